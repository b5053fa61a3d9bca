"""How much a call computes at best: for ratios, since a faster machine or a quieter one says another figure."""

import sys
import time
from collections.abc import Callable
from types import FrameType


def least_cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread in the cheapest of several calls; what else the machine does is no part of them."""

    def once() -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    return min(once() for _ in range(repeats))


def calls_in(call: Callable[[], object]) -> int:
    """How many functions a call calls: the same on any machine, however busy it is."""
    calls = 0

    def count(_frame: FrameType, event: str, _function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls
