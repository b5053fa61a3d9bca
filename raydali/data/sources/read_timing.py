"""Timers of what a loader waits for, and of Python that runs during the steps."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

Cause = Literal["storage", "python", "cpu decode", "gpu decode"]
"""Causes of a loader's waits: reading files; Python; decoding and further processing of pixels, on either device."""


class WaitTimer:
    """Seconds that each cause blocked the consumer of batches; for one thread.

    A nested cause is not counted in the outer one.
    """

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = {}
        self._inner = [0.0]

    @contextmanager
    def by(self, split: Callable[[float], dict[Cause, float]]) -> Iterator[None]:
        """Attribute the time of the `with` block, without nested ones, to causes as `split` divides its seconds."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            for cause, seconds in split(max(0.0, whole - self._inner.pop())).items():
                self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
            self._inner[-1] += whole

    def on(self, cause: Cause) -> AbstractContextManager[None]:
        """Attribute the time of the `with` block to one cause."""
        return self.by(lambda seconds: {cause: seconds})


class PythonCpuTime:
    """CPU time of the pipeline's Python in all threads, in which the training thread could run no Python.

    Attributes:
        seconds: CPU seconds in total; waiting for a file or for the interpreter does not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the CPU time of this thread in the `with` block."""
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
    """Count the time of the `with` block as reading files."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _reading.seconds += time.perf_counter() - began


def reading_seconds() -> float:
    """Total seconds of this thread in `reading`."""
    return _reading.seconds
