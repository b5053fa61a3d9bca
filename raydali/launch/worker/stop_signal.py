"""Notices that end a run between two steps: a preemption, a stop of the driver, a resize."""

from collections.abc import Callable

from raydali.run.events import Notice
from raydali.train.worker import Worker


class StopSignals:
    """The notices of all ranks, on one rank. All ranks must call `poll` at the same steps.

    A notice reaches ranks at different times. At each step the ranks start an asynchronous sum of how many have a
    notice, and read the sum of the previous step. So no rank waits, and all ranks leave at the same step.

    Args:
        mine: returns this rank's notice, if any; called at every step.
    """

    def __init__(self, worker: Worker, mine: Callable[[], Notice | None]) -> None:
        self._worker, self._mine = worker, mine
        self._notice: Notice | None = None
        self._asked: Callable[[], int] | None = None

    def poll(self) -> Notice | None:
        """Return the notice that any rank had at the previous step, the same on all ranks; None if there was none."""
        anyone = self._asked() if self._asked is not None else 0
        if anyone:
            return next(notice for notice in self._worker.exchange(self._notice) if notice)
        self._notice = self._mine()
        self._asked = self._worker.sum_later(int(self._notice is not None))
        return None
