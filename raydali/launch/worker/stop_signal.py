"""Notices that end a run between two steps: a preemption, a stop of the driver, a resize."""

from collections.abc import Callable

from raydali.run.events import Notice
from raydali.train.worker import NOTICES, Worker


class StopSignals:
    """The notices of all ranks, on one rank. All ranks must call `poll` at the same steps.

    A notice reaches ranks at different times, but all ranks know at the same step how many have one, see StepCounts. So
    no rank waits, and all ranks leave at the same step.

    Args:
        mine: returns this rank's notice, if any; called at every step.
    """

    def __init__(self, worker: Worker, mine: Callable[[], Notice | None]) -> None:
        self._worker, self._mine = worker, mine
        self._notice: Notice | None = None

    def poll(self) -> Notice | None:
        """Return the notice that any rank had at the previous step, the same on all ranks; None if there was none."""
        counts = self._worker.counts
        if counts.sums[NOTICES]:
            notices: list[Notice | None] = self._worker.exchange(self._notice)
            return next(filter(None, notices))
        self._notice = self._mine()
        counts.mine[NOTICES] = int(self._notice is not None)
        return None
