"""Decides after a failure whether the run continues, after which pause, and without which nodes.

the storage does not answer        continue after 30 s, doubling to 5 min, for --storage-timeout; not counted
a node lacks the samples,          continue without the node, not counted; if the others do not suffice, the run ends,
or its rank is wrong               or goes on with it as after any failure
the same error twice at one step   on one node: continue without it, if others suffice; otherwise the run ends
the same node twice in a row       continue without it, if others suffice, and for as long as they do
any failure                        is counted up to --max-failures, with growing pauses, until the next checkpoint or
                                   the next broken sample that is found
"""

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from raydali.run.events import Failure
from raydali.run.messages import WorkerError

PAUSES = (0.0, 15.0, 60.0, 300.0)
"""Seconds before the restart after the first failure without progress, the second one, and so on; the last is kept."""
STORAGE_PAUSES = (30.0, 60.0, 120.0, 240.0, 300.0)
SAME_ERROR, SAME_START_ERROR = 2, 5
"""Number of consecutive equal errors at the same step after which it would recur; the second number counts before the
first step of a run that has trained already, since its needs may be away for some minutes."""
LOOK_SECONDS = 10.0
"""Interval between two looks at whether the nodes that are not left out suffice: Ray hears of a lost node later."""
_VARYING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision after a failure.

    Attributes:
        stop_reason: why the run ends; None if it continues.
        pause: seconds until the next start.
        leave_out: ids of nodes that no worker may start on from now on.
        cause: "storage" or "node" if the failure is not the run's own.
    """

    stop_reason: str | None = None
    pause: float = 0.0
    leave_out: tuple[str, ...] = ()
    cause: str | None = None


class RestartPolicy:
    """Judges the failures of a run's worker groups; preemptions and resizes are not failures.

    Args:
        limit: number of consecutive failures without progress; -1: no limit.
        storage_timeout: seconds for which the storage may be away; 0: no limit.
        suffices: returns whether the cluster holds the workers without these nodes.
        now: a monotonic clock.
    """

    def __init__(
        self,
        limit: int,
        storage_timeout: float,
        suffices: Callable[[Collection[str]], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._storage_timeout, self._suffices, self._now = limit, storage_timeout, suffices, now
        self._start = self._without_progress = self._outages = 0
        self._has_trained = False
        self._away_since = self._look_at = 0.0
        self._error: tuple[str, int] | None = None
        self._same = 0
        self._error_nodes: set[str] = set()
        self._last_nodes: set[str] = set()
        self.left_out: tuple[str, ...] = ()

    def group_started(self, step: int) -> None:
        """Note that a worker group has completed its first step after `step`, the step of the newest checkpoint."""
        self._has_trained = True
        self._outages = 0
        if step > self._start:
            self._start, self._without_progress = step, 0

    def made_progress(self) -> None:
        """Note that the next start will go better, for example because a broken sample was found."""
        self._without_progress, self._last_nodes = 0, set()

    def failed(self, failure: Failure, errors: Sequence[WorkerError]) -> Decision:
        """Judge the failure of a worker group.

        Args:
            failure: as Ray Train reports it.
            errors: those that its workers reported, oldest first.
        """
        decision = self._judge(failure, errors)
        self.left_out += decision.leave_out
        return decision

    def take_back(self) -> bool:
        """Leave no node out any more if the others do not suffice by now, at times; return whether some were."""
        if not self.left_out or self._now() < self._look_at:
            return False
        self._look_at = self._now() + LOOK_SECONDS
        if self._suffices(self.left_out):
            return False
        self.left_out = ()
        return True

    def _judge(self, failure: Failure, errors: Sequence[WorkerError]) -> Decision:
        error = errors[0] if errors and not (failure.killed or failure.starting) else None
        if error is not None and error.storage:
            return self._outage()
        if error is not None and error.node_fault:
            at_fault = tuple(sorted({other.node_id for other in errors if other.node_fault}))
            if self._can_leave_out(at_fault):
                return Decision(leave_out=at_fault, cause="node")
            if not error.step:
                return Decision(stop_reason="the other nodes have no room for the workers")
        self._without_progress += 1
        nodes = {failure.places[rank][0] for rank in failure.killed if rank in failure.places}
        if error is not None:
            nodes = {other.node_id for other in errors if _text(other) == _text(error) and other.node_id}
            if why := self._recurs(error, nodes):
                return Decision(stop_reason=why)
        suspects, self._last_nodes = tuple(nodes & self._last_nodes), nodes
        if self._limit == 0:
            return Decision(stop_reason="--max-failures is 0")
        if 0 < self._limit < self._without_progress:
            return Decision(
                stop_reason=f"{self._without_progress} failures in a row without a checkpoint after step "
                f"{self._start}: --max-failures is {self._limit}"
            )
        leave_out = suspects if len(nodes) == 1 and self._can_leave_out(suspects) else ()
        return Decision(pause=_nth(PAUSES, self._without_progress), leave_out=leave_out)

    def _outage(self) -> Decision:
        if not self._outages:
            self._away_since = self._now()
        self._outages += 1
        away = self._now() - self._away_since
        if 0 < self._storage_timeout <= away:
            why = f"the storage has not answered for {away:.0f} s: --storage-timeout is {self._storage_timeout:g}"
            return Decision(stop_reason=why)
        return Decision(pause=_nth(STORAGE_PAUSES, self._outages), cause="storage")

    def _recurs(self, error: WorkerError, nodes: set[str]) -> str | None:
        """Return why an error would recur; None if it may not, or if a single node may be at fault."""
        if (_text(error), error.step) != self._error:
            self._error, self._same, self._error_nodes = (_text(error), error.step), 0, set()
        self._same += 1
        self._error_nodes |= nodes
        starts_again = error.step == 0 and self._has_trained
        if self._same < (SAME_START_ERROR if starts_again else SAME_ERROR):
            return None
        if len(self._error_nodes) == 1 and self._can_leave_out(nodes):
            return None
        return f"the same error occurred {self._same} times in a row after step {error.step}, and would recur"

    def _can_leave_out(self, nodes: Collection[str]) -> bool:
        new = set(nodes) - set(self.left_out)
        return bool(new) and self._suffices({*self.left_out, *new})


def _text(error: WorkerError) -> str:
    """Return the text of an error without its numbers, which vary."""
    return _VARYING.sub("#", error.error)


def _nth(pauses: Sequence[float], count: int) -> float:
    return pauses[min(count, len(pauses)) - 1]
