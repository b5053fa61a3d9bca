"""Replace a lost rank while the others train on: Ray Train's controller starts a new worker in its place.

The controller hosts the store in which the ranks agree (train/roster.py). Ray Train can replace single workers, for
TorchFT; here the controller asks it to do so as soon as a worker's process has died, and hides the death from Ray
Train's own failure handling, which would end all workers. A rank that fails with an error of its own, for example of
its GPU, is lost, too: its process ends once it hears so. If all fail, or with an error of raydali, all restart.

A spare takes the place of a lost rank at once. The new worker then becomes a spare, so a worker's number in Ray Train
is not its rank. To start a worker takes up to half a minute, so another thread does it: others may die meanwhile.
"""

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raydali.errors import RaydaliError
from raydali.launch.channel import DriverChannel, Interrupted
from raydali.run.events import Replaced, WorkerAddress
from raydali.run.messages import Note
from raydali.text import error_line
from raydali.train.membership import NotReplacedError, RankLostError
from raydali.train.roster import all_rehearse, announce_loss, give_up, ranks_of

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus

    from raydali.launch.controller.workers import Workers

STORE = "RAYDALI_STORE"
"""Environment variable with the address of the store, "HOST:PORT", in the controller and the workers."""
MEMBER = "RAYDALI_MEMBER"
"""Environment variable with the name of a worker that replaces a lost one, in the controller and in this worker."""
GIVE_UP_SECONDS = 120.0
"""Time after which lost ranks are not replaced any more, if no replacement has started since the last loss."""
ERROR_SECONDS = 1.0
"""Time in which others may fail with the same error as a rank. If all do, nobody is replaced."""
SPARE_FAILURES = 2
"""Number of errors of a spare after which it is not replaced any more: its GPU may be broken."""
_log = logging.getLogger(__name__)


class Replacements:
    """The lost workers of a worker group, and their replacements. It opens the store of the group, which starts next.

    Args:
        channel: the channel to the driver, which hears of each loss.
        ranks: number of the workers that train; the others are spares.

    Attributes:
        starting: the numbers of the workers that are being replaced now.
    """

    def __init__(self, channel: DriverChannel, ranks: int) -> None:
        self._channel, self._ranks = channel, ranks
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        os.environ[STORE] = f"{ray.util.get_node_ip_address()}:{self._store.port}"
        self._names: dict[int, str] = {}
        self._lost: set[int] = set()
        self._failed_at: dict[int, float] = {}
        self._failures = Counter[int]()  # of spares
        self._changed = 0.0
        self._gave_up = False
        self.starting: Collection[int] = ()

    def survived(
        self, group: "Workers", status: "WorkerGroupPollStatus", starting: Collection[int]
    ) -> "WorkerGroupPollStatus":
        """Return the status of the workers without the deaths that the others survive, and replace the dead ones.

        Args:
            group: the worker group.
            status: its status.
            starting: `starting` when Ray Train asked the workers for the status. Until they are prepared, they have
                errors that mean nothing.
        """
        starting, gone = {*starting, *self.starting}, WorkerStatus(running=False)
        workers = {
            number: gone if number in starting or (number in self._lost and not _has_died(each.error)) else each
            for number, each in status.worker_statuses.items()
        }
        status = replace(status, worker_statuses=workers)
        dead = {number: each.error for number, each in workers.items() if _has_died(each.error)}
        failed = {number: each.error for number, each in workers.items() if _may_succeed_elsewhere(each.error)}
        if failed and not self._channel.board().training:
            failed = {}  # before the first step all may fail, but not at the same time
        others = {number: each for number, each in workers.items() if number not in {*dead, *failed}}
        if not (dead or failed or starting or self._changed) or any(each.error for each in others.values()):
            return status
        if not all_rehearse(self._store, self._ranks):
            return status
        members, asking = ranks_of(self._store, self._ranks)
        running = [number for number, each in others.items() if each.running]
        training = [number for number in running if self._name(number) in members]
        is_complete = len(members) == self._ranks
        waiting = {number for number in [*running, *failed] if self._name(number) not in members}
        # A replacement that has not joined yet has no state to go on from, and if it fails, the next one would, too.
        if not training or (not is_complete and waiting & {*failed}):
            return status
        news = {number: error for number, error in dead.items() if number not in self._lost}
        for number, error in failed.items():
            if time.monotonic() - self._failed_at.setdefault(number, time.monotonic()) >= ERROR_SECONDS:
                news[number] = error
        self._announce(group, news, members | asking, len(training))
        for number in waiting & {*news}:
            self._failures[number] += 1
            _kill(group, number)
        if not is_complete and 0 < group.start_timeout <= time.monotonic() - self._changed:
            self._end_late(group, {number for number in waiting if self._name(number) not in asking})
        replaceable = [number for number in sorted(dead) if self._failures[number] < SPARE_FAILURES]
        if replaceable and not (starting or self._gave_up):
            self.starting = replaceable
            Thread(target=self._replace, args=(group, self.starting), daemon=True, name="replacement").start()
        waited = time.monotonic() - self._changed
        if self._lost and len(running) < self._ranks and waited >= GIVE_UP_SECONDS and not self._gave_up:
            self._gave_up = True
            give_up(self._store)
        return replace(status, worker_statuses={number: others.get(number, gone) for number in workers})

    def _end_late(self, group: "Workers", numbers: Collection[int]) -> None:
        """End workers that have not asked for the place of a lost rank in time: they are replaced, too."""
        late = f"a worker that replaces a lost rank was not ready within {group.start_timeout:g} s (--start-timeout)"
        for number in numbers:
            self._changed = time.monotonic()
            self._channel.post(Note(f"{late}, and is ended"))
            _kill(group, number)

    def _name(self, number: int) -> str:
        return self._names.get(number, str(number))

    def _announce(
        self, group: "Workers", news: dict[int, Exception | None], ranks: dict[str, int], remaining: int
    ) -> None:
        """Tell the ranks and the driver of lost workers; `ranks` are those that workers have or ask for."""
        if not news:
            return
        workers, places = group.get_workers(), dict[int, WorkerAddress]()
        for number in news:
            announce_loss(self._store, self._name(number))
            self._lost.add(number)
            self._failed_at.pop(number, None)
            self._changed = time.monotonic()
            of_spare = min(0, *places) - 1 if places else -1
            metadata = workers[number].metadata
            places[ranks.get(self._name(number), of_spare)] = metadata.node_id, metadata.pid
        lost = sorted(rank for rank in places if rank >= 0)
        error = error_line(next(error for error in news.values() if error is not None))
        spares = len(places) - len(lost)
        self._channel.post(Replaced(ranks=lost, spares=spares, remaining=remaining, places=places, error=error))

    def _replace(self, group: "Workers", numbers: Collection[int]) -> None:
        """Start workers in the places of dead ones, if their nodes are there, or Ray has found other ones."""
        for number in numbers:
            try:
                place = group.get_worker_group_state().placement_group_handle.placement_group
                if ray.util.placement_group_table(place)["state"] == "CREATED":
                    self._names[number] = os.environ[MEMBER] = f"{number}-{secrets.token_hex(4)}"
                    group.replace_replica_group(number)
                    self._lost.remove(number)
                    self._changed = time.monotonic()
            except Exception:  # for example, another one has died, too; the others train on
                _log.exception("worker %d could not be replaced", number)
        self.starting = ()


def _kill(group: "Workers", number: int) -> None:
    ray.kill(group.get_workers()[number].actor)


def _has_died(error: Exception | None) -> bool:
    """Return whether a worker's process has died, but not with a node that was taken away."""
    cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
    return isinstance(cause, RayActorError) and not cause.preempted


def _may_succeed_elsewhere(error: Exception | None) -> bool:
    """Return whether a worker failed with an error of its own code or device, not of raydali or of the whole group."""
    cause = error._base_exc if isinstance(error, UserExceptionWithTraceback) else None
    of_all = RaydaliError, Interrupted, RankLostError, NotReplacedError
    return isinstance(cause, Exception) and not isinstance(cause, of_all)
