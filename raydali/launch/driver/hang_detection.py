"""Hangs: how the driver tells that a run stands still, and who holds it up.

Each worker has a thread that says every few seconds how far training is. A process that is frozen says nothing; one
that waits says what it waits for. All ranks stand still when one does, so the one that did least is to blame, unless it
only waits for the others.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_SECONDS = 2.0
_SILENT_BEATS = 4
"""So many beats late, a process is frozen, or its host is."""
_SHOWN_FRAMES = 12
_OF_LIBRARIES = "site-packages"
_EXCHANGES = os.path.join("raydali", "train", "worker.py")
"""The file in which ranks wait for each other, outside of a backward pass."""


class Heartbeat:
    """A worker's thread that tells how far the thread that made it is.

    Args:
        tell: hands a message to the driver, without waiting.
        count: what grows while training gets on: batches taken, those of validation too, and calls repeated.
        place: how far it is, comparable with that of other ranks: steps done, and a half for the batch of the next.
        patience: seconds of standing still from which on a beat holds the stack.
        facts: who this is.
    """

    def __init__(
        self,
        tell: Callable[..., None],
        count: Callable[[], int],
        place: Callable[[], float],
        patience: float,
        **facts: Any,
    ) -> None:
        self._tell, self._count, self._place, self._patience = tell, count, place, patience
        self._facts = facts | {"pid": os.getpid(), "started": started(os.getpid())}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Fall silent, for good."""
        self._over.set()
        self._tell("beat", **self._facts, count=-1, place=0.0, stack=None, waits=False)

    def _beat(self) -> None:
        last, since = -1, time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            count = self._count()
            if count != last:
                last, since = count, time.monotonic()
            stuck = time.monotonic() - since > self._patience
            stack, waits = self._stack() if stuck else (None, False)
            self._tell("beat", **self._facts, count=count, place=self._place(), stack=stack, waits=waits)

    def _stack(self) -> tuple[str, bool]:
        """Return the thread's stack, and whether it waits for other ranks there."""
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        ours = [each for each in frames if _OF_LIBRARIES not in each.filename] or frames
        # Where it is inside a library counts too: a collective, a read.
        shown = [*ours[-_SHOWN_FRAMES:], *([frames[-1]] if frames and frames[-1] not in ours else [])]
        waits = any(each.filename.endswith(_EXCHANGES) for each in frames)
        return "".join(traceback.format_list(shown)), waits


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


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine's start: what tells it from another one of the same id; None
    where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


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
