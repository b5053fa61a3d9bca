"""Replace a lost rank while the others train on: Ray Train's controller starts a new worker in its place.

The controller hosts the store in which the ranks agree (train/roster.py). Ray Train can replace single workers, for
TorchFT; here the controller asks it to do so as soon as a worker's process has died, and hides the death from Ray
Train's own failure handling, which would end all workers. If another rank fails, too, all are restarted as usual.

A spare takes the place of a lost rank at once. The new worker then becomes a spare, so a worker's number in Ray Train
is not its rank.
"""

import logging
import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raydali.launch.channel import DriverChannel
from raydali.run.events import Replaced, WorkerAddress
from raydali.text import error_line
from raydali.train.roster import announce_loss, give_up, ranks_of

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus

STORE = "RAYDALI_STORE"
"""Environment variable with the address of the store, "HOST:PORT", in the controller and the workers."""
MEMBER = "RAYDALI_MEMBER"
"""Environment variable with the name of a worker that replaces a lost one, in the controller and in this worker."""
GIVE_UP_SECONDS = 120.0
"""Time after which lost ranks are not replaced any more, if there is no place for their replacements."""
_log = logging.getLogger(__name__)


class Replacements:
    """The lost workers of the current worker group, and their replacements.

    Args:
        channel: the channel to the driver, which hears of each loss.
        ranks: number of the workers that train; the others are spares.
    """

    def __init__(self, channel: DriverChannel, ranks: int) -> None:
        self._channel, self._ranks = channel, ranks
        self._store: TCPStore | None = None
        self._names: dict[int, str] = {}
        self._lost: dict[int, float] = {}
        self._gave_up = False

    def begin_group(self) -> None:
        """Open the store of a new worker group."""
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        os.environ[STORE] = f"{ray.util.get_node_ip_address()}:{self._store.port}"
        self._names, self._lost, self._gave_up = {}, {}, False

    def survived(self, group: "WorkerGroup", status: "WorkerGroupPollStatus") -> "WorkerGroupPollStatus":
        """Return the status of the workers without the deaths that the others survive, and replace the dead ones."""
        workers = status.worker_statuses
        dead = {number: each.error for number, each in workers.items() if _has_died(each.error)}
        others = {number: each for number, each in workers.items() if number not in dead}
        if not dead or any(each.error for each in others.values()) or not self._channel.board().training:
            return status
        assert self._store is not None
        # A replacement that has not joined yet has no state to go on from.
        members, asking = ranks_of(self._store, self._ranks)
        running = [number for number, each in others.items() if each.running]
        training = [number for number in running if self._name(number) in members]
        if not training:
            return status
        news = {number: error for number, error in dead.items() if number not in self._lost}
        self._announce(group, news, members | asking, len(training))
        for number in sorted(self._lost):
            self._replace(group, number)
        waited = time.monotonic() - max(self._lost.values(), default=float("inf"))
        if len(running) < self._ranks and waited >= GIVE_UP_SECONDS and not self._gave_up:
            self._gave_up = True
            give_up(self._store)
        gone = WorkerStatus(running=False)
        statuses = {number: gone if number in dead else each for number, each in workers.items()}
        return replace(status, worker_statuses=statuses)

    def _name(self, number: int) -> str:
        return self._names.get(number, str(number))

    def _announce(
        self, group: "WorkerGroup", news: dict[int, Exception | None], ranks: dict[str, int], remaining: int
    ) -> None:
        """Tell the ranks and the driver of workers that have died; `ranks` are those that workers have or ask for."""
        assert self._store is not None
        if not news:
            return
        workers, places = group.get_workers(), dict[int, WorkerAddress]()
        for number in news:
            announce_loss(self._store, self._name(number))
            self._lost[number] = time.monotonic()
            of_spare = min(0, *places) - 1 if places else -1
            metadata = workers[number].metadata
            places[ranks.get(self._name(number), of_spare)] = metadata.node_id, metadata.pid
        lost = sorted(rank for rank in places if rank >= 0)
        error = error_line(next(error for error in news.values() if error is not None))
        spares = len(places) - len(lost)
        self._channel.post(Replaced(ranks=lost, spares=spares, remaining=remaining, places=places, error=error))

    def _replace(self, group: "WorkerGroup", number: int) -> None:
        """Start a worker in the place of a dead one, if its node is there, or Ray has found another one."""
        if self._gave_up:
            return
        place = group.get_worker_group_state().placement_group_handle.placement_group
        try:
            if ray.util.placement_group_table(place)["state"] == "CREATED":
                self._names[number] = os.environ[MEMBER] = f"{number}-{secrets.token_hex(4)}"
                group.replace_replica_group(number)
                del self._lost[number]
        except Exception:  # whatever Ray makes of it: the others train on
            _log.exception("worker %d could not be replaced", number)


def _has_died(error: Exception | None) -> bool:
    """Return whether a worker's process has died, but not with a node that was taken away."""
    cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
    return isinstance(cause, RayActorError) and not cause.preempted
