"""Detects that a run makes no progress, and which ranks hold it up.

Every worker sends heartbeats with its progress. A frozen process sends none; one that is stuck sends its stack. Since
all ranks stop when one does, the ranks with the least progress are to blame, unless they only wait for others.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence

from raydali.host.processes import start_ticks
from raydali.launch.driver.on_nodes import call_on_nodes
from raydali.run.events import StuckRank, WorkerAddress
from raydali.run.messages import HEARTBEAT_SECONDS, Heartbeat

_MISSED_HEARTBEATS = 4
"""Missed heartbeats after which a process, or its host, counts as frozen."""


class HangWatch:
    """Takes heartbeats, and finds the ranks that hold up the run.

    Args:
        timeout: seconds without progress of any rank; 0: no limit.
        now: a monotonic clock.
        start_timeout: seconds from a group's first heartbeat to its first step; 0: no limit.
    """

    def __init__(
        self, timeout: float, now: Callable[[], float] = time.monotonic, *, start_timeout: float = 0.0
    ) -> None:
        self._timeouts = {True: timeout, False: start_timeout}
        self._now = now
        self._heartbeats: dict[WorkerAddress, tuple[float, Heartbeat]] = {}
        self._since: float | None = None
        self._training = False
        self._placed = 0

    def group_placed(self, workers: int) -> None:
        """Note that so many workers have their places: from now on each must start, and send a heartbeat."""
        if not self._placed:
            self._placed = workers
            if self._since is None:
                self._since = self._now()

    def training_started(self) -> None:
        """Note that a worker group has completed its first step: from now on it must make progress."""
        self._since, self._training = self._now(), True

    def group_ended(self) -> None:
        """Note that the worker group has ended."""
        self._since, self._heartbeats, self._training, self._placed = None, {}, False, 0

    def heartbeat(self, message: Heartbeat) -> None:
        """Take a heartbeat of a worker."""
        address = message.node_id, message.pid
        _, last = self._heartbeats.get(address, (0.0, None))
        if not self._heartbeats or (self._training and (last is None or last.count != message.count)):
            self._since = self._now()
        self._heartbeats[address] = self._now(), message

    def forget(self, worker: WorkerAddress) -> None:
        """Note that a worker has finished, and sends no more heartbeats."""
        self._heartbeats.pop(worker, None)

    def is_late(self) -> bool:
        """Return whether a worker is not ready for too long after its group was placed; the time then starts again."""
        if self._training or len(self._heartbeats) >= self._placed or not self._is_over(self._now()):
            return False
        self._since = self._now()
        return True

    def stuck(self) -> Sequence[StuckRank]:
        """Return the ranks that hold up the run, if it made no progress for too long; the timeout then starts again."""
        now = self._now()
        if not self._heartbeats or not self._is_over(now):
            return ()
        silent_after = _MISSED_HEARTBEATS * HEARTBEAT_SECONDS
        silent = [message for at, message in self._heartbeats.values() if now - at > silent_after]
        least = min(message.progress for _, message in self._heartbeats.values())
        behind = [message for _, message in self._heartbeats.values() if message.progress == least]
        blamed = silent or [message for message in behind if not message.waits] or behind
        self._since = now
        return [_stuck(last, frozen=bool(silent)) for last in sorted(blamed, key=lambda last: last.rank)]

    def _is_over(self, now: float) -> bool:
        return self._since is not None and 0 < self._timeouts[self._training] <= now - self._since


def _stuck(last: Heartbeat, *, frozen: bool) -> StuckRank:
    return StuckRank(
        rank=last.rank,
        node=last.node,
        node_id=last.node_id,
        pid=last.pid,
        started=last.started,
        frozen=frozen,
        stack=None if frozen else last.stack,
    )


def kill_process(pid: int, started: int | None) -> None:
    """Send SIGKILL to a process of this machine, unless another one has its id by now."""
    if started is not None and start_ticks(pid) == started:
        os.kill(pid, signal.SIGKILL)


def kill(stuck: Sequence[StuckRank], timeout: float = 10) -> None:
    """Send SIGKILL to these processes, each from its own node; if a node does not answer, that is left to Ray."""
    call_on_nodes(kill_process, [(each.node_id, (each.pid, each.started)) for each in stuck], timeout)
