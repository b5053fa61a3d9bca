"""Detects that a worker group makes no progress, and which ranks hold it up.

Every worker sends heartbeats with its progress. A frozen process sends none; one that is stuck sends its stack. Since
all ranks stop when one does, the ranks with the least progress are to blame, unless they only wait for others.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence

from raydali.host.cpu_times import start_ticks
from raydali.launch.driver.cluster import call_on_nodes
from raydali.run.events import StuckRank
from raydali.run.messages import HEARTBEAT_SECONDS, Heartbeat

_SILENT_SECONDS = 4 * HEARTBEAT_SECONDS
"""Without a heartbeat for so long, a process, or its host, counts as frozen."""


class HangWatch:
    """Takes the heartbeats of a worker group, and finds the ranks that hold it up.

    Args:
        workers: the group's.
        timeout: seconds without progress of any rank, once the group trains; 0: no limit.
        start_timeout: seconds from the group's placement, or first heartbeat, to its first step; 0: no limit.
        now: a monotonic clock.
    """

    def __init__(
        self, workers: int, timeout: float, start_timeout: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers, self._timeout, self._start_timeout, self._now = workers, timeout, start_timeout, now
        self._heartbeats: dict[int, tuple[float, Heartbeat]] = {}
        self._since: float | None = None
        self._training = False

    def group_placed(self) -> None:
        """Note that the workers have their places: from now on each must start, and send a heartbeat."""
        if self._since is None:
            self._since = self._now()

    def training_started(self) -> None:
        """Note that the group has completed its first step: from now on it must make progress."""
        self._since, self._training = self._now(), True

    def heartbeat(self, message: Heartbeat) -> None:
        """Take a heartbeat of a worker."""
        _, last = self._heartbeats.get(message.rank, (0.0, None))
        if not self._heartbeats or (self._training and (last is None or last.count != message.count)):
            self._since = self._now()
        self._heartbeats[message.rank] = self._now(), message

    def forget(self, rank: int) -> None:
        """Note that a worker has finished, and sends no more heartbeats."""
        self._heartbeats.pop(rank, None)

    def is_late(self) -> bool:
        """Return whether a worker is not ready for too long after its group was placed; the time then starts again."""
        if self._training or len(self._heartbeats) >= self._workers or not self._is_over():
            return False
        self._since = self._now()
        return True

    def stuck(self) -> Sequence[StuckRank]:
        """Return the ranks that hold up the group, if it made no progress for too long; the time then starts again."""
        if not self._heartbeats or not self._is_over():
            return ()
        self._since = now = self._now()
        silent = [message for at, message in self._heartbeats.values() if now - at > _SILENT_SECONDS]
        least = min(message.progress for _, message in self._heartbeats.values())
        behind = [message for _, message in self._heartbeats.values() if message.progress == least]
        blamed = silent or [message for message in behind if not message.waits] or behind
        return [
            StuckRank(
                rank=last.rank,
                node=last.node,
                node_id=last.node_id,
                pid=last.pid,
                started=last.started,
                frozen=bool(silent),
                stack=None if silent else last.stack,
            )
            for last in sorted(blamed, key=lambda last: last.rank)
        ]

    def _is_over(self) -> bool:
        timeout = self._timeout if self._training else self._start_timeout
        return self._since is not None and 0 < timeout <= self._now() - self._since


def kill_process(pid: int, started: int | None) -> None:
    """Send SIGKILL to a process of this machine, unless another one has its id by now."""
    if started is not None and start_ticks(pid) == started:
        os.kill(pid, signal.SIGKILL)


def kill(stuck: Sequence[StuckRank], timeout: float = 10) -> None:
    """Send SIGKILL to these processes, each from its own node; if a node does not answer, that is left to Ray."""
    call_on_nodes(kill_process, [(rank.node_id, (rank.pid, rank.started)) for rank in stuck], timeout)
