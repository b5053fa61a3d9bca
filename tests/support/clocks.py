"""How much a call computes at best: for ratios, since a faster machine or a quieter one says another figure."""

import time
from collections.abc import Callable


def least_cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread in the cheapest of several calls; what else the machine does is no part of them."""

    def once() -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    return min(once() for _ in range(repeats))
