"""Notices that end a run between two steps: a preemption, a stop of the driver, a resize."""

from collections.abc import Callable

from raydali.run.events import Notice
from raydali.train.worker import Worker


class StopSignals:
    """One rank's part; all ranks must call `poll` at the same steps.

    A notice reaches ranks at different times. At each step they start to sum how many have one, and read the sum of the
    step before: no rank waits, and all leave at the same step.

    Args:
        mine: returns this rank's notice, if any; called at every step.
    """

    def __init__(self, worker: Worker, mine: Callable[[], Notice | None]) -> None:
        self._worker, self._mine = worker, mine
        self._notice: Notice | None = None
        self._asked: Callable[[], int] | None = None

    def poll(self) -> Notice | None:
        """Return the notice that any rank had at the step before, the same on all ranks; None for none."""
        anyone = self._asked() if self._asked is not None else 0
        if anyone:
            return next(notice for notice in self._worker.exchange(self._notice) if notice)
        self._notice = self._mine()
        self._asked = self._worker.sum_later(int(self._notice is not None))
        return None
