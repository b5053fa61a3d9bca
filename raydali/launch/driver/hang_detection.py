"""Hangs: how the driver tells that a run stands still, and who holds it up.

Each worker has a thread that says every few seconds how far training is. A process that is frozen says nothing; one
that waits says what it waits for. All ranks stand still when one does, so the one that did least is to blame, unless it
only waits for the others.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydali.launch.worker.heartbeat import BEAT_SECONDS, started

_SILENT_BEATS = 4
"""So many beats late, a process is frozen, or its host is."""


@dataclass(frozen=True)
class Stuck:
    """A rank that holds a run up.

    Attributes:
        started: when its process did, see `started`.
        frozen: whether its process says nothing any more.
        stack: where it is; None where it does not say.
    """

    rank: int
    node: str
    node_id: str
    pid: int
    started: int | None
    frozen: bool
    stack: str | None


class HangWatch:
    """The driver's side: takes beats, and says who holds the run up.

    Args:
        timeout: seconds for which no rank may get on; 0: for ever.
        now: a monotonic clock.
        start_timeout: seconds from a group's first beat to its first step; 0: for ever.
    """

    def __init__(
        self, timeout: float, now: Callable[[], float] = time.monotonic, *, start_timeout: float = 0.0
    ) -> None:
        self._timeouts = {True: timeout, False: start_timeout}
        self._now = now
        self._beats: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._since: float | None = None
        self._training = False

    def begun(self) -> None:
        """A worker group has done its first step: from now on it must get on."""
        self._since, self._training = self._now(), True

    def over(self) -> None:
        """The worker group is gone."""
        self._since, self._beats, self._training = None, {}, False

    def beat(self, message: Mapping[str, Any]) -> None:
        """Take a beat."""
        rank, last = message["rank"], self._beats.get(message["rank"])
        if message["count"] < 0:  # it has left
            self._beats.pop(rank, None)
            return
        if self._since is None or (self._training and (last is None or last[1]["count"] != message["count"])):
            self._since = self._now()
        self._beats[rank] = self._now(), message

    def stuck(self) -> Sequence[Stuck]:
        """Who holds the run up, where it has stood still for too long; the clock begins anew then."""
        now = self._now()
        if self._since is None or not self._beats or not 0 < self._timeouts[self._training] <= now - self._since:
            return ()
        silent = {rank for rank, (at, _) in self._beats.items() if now - at > _SILENT_BEATS * BEAT_SECONDS}
        least = min(message["place"] for _, message in self._beats.values())
        behind = {rank for rank, (_, message) in self._beats.items() if message["place"] == least}
        blamed = silent or {rank for rank in behind if not self._beats[rank][1]["waits"]} or behind
        self._since = now
        return [self._describe(rank, rank in silent) for rank in sorted(blamed)]

    def _describe(self, rank: int, frozen: bool) -> Stuck:
        _, message = self._beats[rank]
        stack = None if frozen else message["stack"]
        where = message["node"], message["node_id"], message["pid"], message["started"]
        return Stuck(rank, *where, frozen, stack)


def kill_process(pid: int, its_start: int | None) -> None:
    """SIGKILL to a process of this machine, unless the id is another's: workers may have process ids of their own."""
    if its_start is not None and started(pid) == its_start:
        os.kill(pid, signal.SIGKILL)


def kill(stuck: Sequence[Stuck], timeout: float = 10) -> None:
    """SIGKILL to these processes, each from its own node; one whose node does not answer is left to Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kill_there = ray.remote(num_cpus=0, max_retries=0)(kill_process)
    asked = [
        kill_there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each.node_id, soft=False)).remote(
            each.pid, each.started
        )
        for each in stuck
    ]
    ray.wait(asked, num_returns=len(asked), timeout=timeout)
