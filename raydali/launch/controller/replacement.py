"""Replace a lost rank while the others train on: Ray Train's controller starts a new worker in its place.

The controller hosts the store in which the ranks agree (train/membership.py). Ray Train can replace single workers, for
TorchFT; here the controller asks it to do so as soon as a worker's process has died, and hides the death from Ray
Train's own failure handling, which would end all workers. If another rank fails, too, all are restarted as usual.
"""

import logging
import os
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
from raydali.train.membership import announce_loss, give_up, members_of

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus

STORE = "RAYDALI_STORE"
"""Environment variable with the address of the store, "HOST:PORT", in the controller and the workers."""
GIVE_UP_SECONDS = 120.0
"""Time after which a lost rank is not replaced any more, if its place is free nowhere."""
_log = logging.getLogger(__name__)


class Replacements:
    """The lost ranks of the current worker group, and their replacements.

    Args:
        channel: the channel to the driver, which hears of each loss.
    """

    def __init__(self, channel: DriverChannel) -> None:
        self._channel = channel
        self._store: TCPStore | None = None
        self._lost: dict[int, float] = {}
        self._places: dict[int, WorkerAddress] = {}
        self._gave_up = False

    def begin_group(self) -> None:
        """Open the store of a new worker group."""
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        os.environ[STORE] = f"{ray.util.get_node_ip_address()}:{self._store.port}"
        self._lost, self._places, self._gave_up = {}, {}, False

    def survived(self, group: "WorkerGroup", status: "WorkerGroupPollStatus") -> "WorkerGroupPollStatus":
        """Return the status of the workers without the deaths that the others survive, and replace the dead ones."""
        ranks = status.worker_statuses
        dead = {rank: each.error for rank, each in ranks.items() if _has_died(each.error)}
        others = {rank: each for rank, each in ranks.items() if rank not in dead}
        if not dead:
            workers = enumerate(group.get_workers())
            self._places = {rank: (worker.metadata.node_id, worker.metadata.pid) for rank, worker in workers}
            return status
        if any(each.error for each in others.values()) or not self._channel.board().training:
            return status
        assert self._store is not None
        # A replacement that has not joined yet has no state to go on from.
        members = [rank for rank in members_of(self._store, len(ranks)) if rank in others and others[rank].running]
        if not members:
            return status
        self._announce({rank: error for rank, error in dead.items() if rank not in self._lost}, len(members))
        for rank in sorted(self._lost):
            self._replace(group, rank)
        gone = WorkerStatus(running=False)
        return replace(status, worker_statuses={rank: gone if rank in dead else each for rank, each in ranks.items()})

    def _announce(self, news: dict[int, Exception | None], remaining: int) -> None:
        assert self._store is not None
        if not news:
            return
        for rank in news:
            announce_loss(self._store, rank)
            self._lost[rank] = time.monotonic()
        places = {rank: self._places[rank] for rank in news if rank in self._places}
        error = error_line(next(error for error in news.values() if error is not None))
        self._channel.post(Replaced(ranks=sorted(news), remaining=remaining, places=places, error=error))

    def _replace(self, group: "WorkerGroup", rank: int) -> None:
        """Start a worker in the place of a dead one, if its node is there, or Ray has found another one."""
        assert self._store is not None
        if self._gave_up:
            return
        place = group.get_worker_group_state().placement_group_handle.placement_group
        try:
            if ray.util.placement_group_table(place)["state"] == "CREATED":
                group.replace_replica_group(rank)
                del self._lost[rank]
                return
        except Exception:  # whatever Ray makes of it: the others train on
            _log.exception("rank %d could not be replaced", rank)
        if time.monotonic() - self._lost[rank] >= GIVE_UP_SECONDS:
            self._gave_up = True
            give_up(self._store)


def _has_died(error: Exception | None) -> bool:
    """Return whether a worker's process has died, but not with a node that was taken away."""
    cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
    return isinstance(cause, RayActorError) and not cause.preempted
