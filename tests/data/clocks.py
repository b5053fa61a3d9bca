"""How long a call takes at best."""

import time
from collections.abc import Callable


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return min(once() for _ in range(repeats))
