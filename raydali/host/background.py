"""Calls functions in a background thread, so that a loop waits for no storage, network or terminal."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread


class Background:
    """A thread that calls functions one after the other. It ends with the process.

    Attributes:
        calls: takes the functions.
        error: the first exception of a call.
    """

    def __init__(self, name: str) -> None:
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.error: Exception | None = None
        Thread(target=self._run, daemon=True, name=name).start()

    def done(self) -> Event:
        """Return an event that is set when all calls so far have returned."""
        done = Event()
        self.calls.put(done.set)
        return done

    def _run(self) -> None:
        while True:
            try:
                self.calls.get()()
            except Exception as error:
                self.error = self.error or error
