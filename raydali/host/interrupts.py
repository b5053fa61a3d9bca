"""Handling of SIGINT, SIGTERM and SIGHUP: raise KeyboardInterrupt, delay them, or request the end of a run."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS_WITH_INPUT = "RAYDALI_ENDS_WITH_INPUT"
"""The environment variable by which a program tells a job that the job's standard input ends when the program does."""
HARD_EXIT_AT = 3
"""The number of the signal that ends the process at once."""
SAME_SECONDS = 0.2
"""Signals within this time count as one: a program may signal a process and then its group."""


def end_with_input() -> None:
    """If ENDS_WITH_INPUT is set, send this process SIGTERM once its standard input ends."""
    if os.environ.pop(ENDS_WITH_INPUT, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1):  # unbuffered: a thread that waits in a buffered file breaks the end of the process
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="end of input").start()


def raise_on_signals() -> None:
    """Make these signals raise KeyboardInterrupt, SIGINT and SIGTERM even if they were ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Delay these signals until the end of the `with` block.

    This is for writes to object stores: a stream commits when it is closed, so an exception in between would leave an
    incomplete object.
    """
    came: list[int] = []
    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


class Interrupt:
    """A request to end a run, by a signal or by a call of `request`.

    Attributes:
        why: the first reason; empty without a request.
    """

    def __init__(self) -> None:
        self.why = ""
        self._times = 0
        self._last_signal = float("-inf")

    def request(self, why: str = "interrupted") -> None:
        """Request an end after a checkpoint; a second request does not wait for one. Thread-safe."""
        self.why = self.why or why
        self._times += 1

    def requested(self) -> bool:
        """Return whether the run must end."""
        return self._times >= 1

    def again(self) -> bool:
        """Return whether the run must end without waiting for a checkpoint."""
        return self._times >= 2

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Treat these signals in the `with` block as requests; the third one ends the process at once."""
        with _handled_by(self._signal):
            yield

    def _signal(self, number: int, _: object) -> None:
        now = time.monotonic()
        if now - self._last_signal < SAME_SECONDS:
            return
        self._last_signal = now
        self.request("interrupted, since its terminal was closed" if number == signal.SIGHUP else "interrupted")
        if self._times >= HARD_EXIT_AT:
            os._exit(130)


@contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Install a handler for these signals. Do nothing outside the main thread: only this one handles signals."""
    with ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if callable(before):  # the default of SIGTERM is not callable: it ends the process
                    restored.callback(signal.signal, number, before)
                    signal.signal(number, handler)
        yield
