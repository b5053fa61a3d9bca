"""The notices that end a run between two steps: a node that is taken away, a driver that is told to end, a resize."""

from collections.abc import Callable

from raydali.run.events import Notice
from raydali.train.worker import Worker


class StopSignals:
    """One rank's part; all ranks must call `poll` at the same steps.

    A notice reaches ranks at different times. So each step they begin to add up who has one, and look at the last
    step's sum: nobody waits, and all leave at the same step.

    Args:
        worker: who this is.
        mine: what this rank was told, if anything; asked at every step.
    """

    def __init__(self, worker: Worker, mine: Callable[[], Notice | None]) -> None:
        self._worker, self._mine = worker, mine
        self._told: Notice | None = None
        self._asked: Callable[[], int] | None = None

    def poll(self) -> Notice | None:
        """What any rank had been told by the step before, the same on all of them; None for nothing."""
        anyone = self._asked() if self._asked is not None else 0
        if anyone:
            return next(notice for notice in self._worker.exchange(self._told) if notice)
        self._told = self._mine()
        self._asked = self._worker.sum_later(int(self._told is not None))
        return None
