"""Who kept a loader waiting, and what ran beside the steps: seconds, taken where they pass."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Cause = Literal["storage", "python", "cpu decode", "gpu decode"]
"""What a loader can be held up by: reading files; Python; decoding and all that is done to pixels, on either device."""


class WaitTimer:
    """How long each cause blocked the one who asked for batches, in seconds; for one thread.

    What is entered inside another cause's time is taken out of it.
    """

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = {}
        self._inner = [0.0]

    @contextmanager
    def by(self, split: Callable[[float], dict[Cause, float]]) -> Iterator[None]:
        """The time inside, less what is entered in there, goes to whom `split` gives its seconds."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            for cause, seconds in split(max(0.0, whole - self._inner.pop())).items():
                self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
            self._inner[-1] += whole

    def on(self, cause: Cause) -> Any:
        """The same with one cause."""
        return self.by(lambda seconds: {cause: seconds})


class PythonCpuTime:
    """What the pipeline's Python has computed, in whichever thread; as long, the training thread could run none.

    Attributes:
        seconds: of a core, in total; waiting inside, for a file or for the interpreter, is left out.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """What this thread computes inside is Python's."""
        began = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - began
            with self._lock:
                self.seconds += seconds


class _Reading(threading.local):
    seconds = 0.0


_reading = _Reading()


@contextmanager
def reading() -> Iterator[None]:
    """The time inside is spent on reading files."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _reading.seconds += time.perf_counter() - began


def reading_seconds() -> float:
    """How long this thread was inside `reading`, in total."""
    return _reading.seconds
