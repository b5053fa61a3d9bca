"""Ranks that train together hear of losses, leave the call that these block, and agree on who they are.

A store outside of all ranks, in the process that starts them, has the list of changes (roster.py). All ranks see the
changes in one order, and an agreement that a further change interrupts starts again. Only losses interrupt calls, at
different places in different ranks: a rank whose call returned goes on, and hears of the loss at its next one.
Therefore ranks are at most one step apart. Those that ask are admitted after a loss, too.

On GPUs, NCCL sums gradients. Its kernels wait on the GPU for all ranks, so a call ends when the GPU has done it.
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Condition, Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from raydali.train.nccl_groups import NcclGroups
from raydali.train.roster import Entry, Roster, append, give_up, note_rehearsal

T = TypeVar("T")

FENCED = 75
"""Exit code of a rank that was declared lost, and is alive: the others go on without it."""
GRACE_SECONDS = 30.0
"""Time from a broken connection to the announcement of the loss; without one, the error is no loss."""
_POLL_SECONDS = 0.005
_POLL_GPU_SECONDS = 5e-5
_CPU = torch.device("cpu")


class Groups(NamedTuple):
    """The process groups of the members: for values on the host, and on GPUs another one for gradients, with NCCL."""

    values: dist.ProcessGroup
    gradients: dist.ProcessGroup | None


class RankLostError(Exception):
    """Ranks were lost, which interrupted this call. `Membership.agree` is next."""

    def __str__(self) -> str:
        return "other ranks of this run were lost"


class NotReplacedError(Exception):
    """Ranks are lost, and nobody replaces them any more; or the run is over, for a process that waits for a place."""


class Membership:
    """The ranks that train together, as seen by one of them, or by a process that waits for a place among them.

    Args:
        connect: returns a new connection to the store. A call that was left may use its connection for long.
        rank: this rank; of a process that joins any one.
        world_size: number of ranks at the beginning.
        name: the name of a process that joins, which no other process has. Others have their rank as a name.
        timeout: the timeout of the calls of new process groups.
        device: the device of the gradients of this rank.

    Attributes:
        joins: whether this process takes the place of a lost rank.
        world_size: see the argument.
        rank: this rank, by its number at the beginning; of a process that joins any one, until it asks for a place.
        is_idle: whether it waits until a rank is lost, or until it is admitted.
        members: the ranks at the last agreement, by their numbers at the beginning; those that joined come last.
        seconds_awaited: for how long this rank has waited for replacements.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        world_size: int,
        *,
        name: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = _CPU,
    ) -> None:
        self._nccl = NcclGroups(device, timeout) if device.type == "cuda" else None
        self._connect, self._store, self._watched = connect, connect(), connect()
        self.rank, self.world_size, self.joins, self.is_idle = rank, world_size, name is not None, False
        self.members, self._timeout = tuple(range(world_size)), timeout
        self.seconds_awaited = 0
        self._name = str(rank) if name is None else name
        self._entries: list[Entry] = []
        self._roster = Roster((), world_size)
        self._generation = 0
        self._changed = Condition()
        self._ahead = self._connect_ahead()
        Thread(target=self._watch, daemon=True, name="membership").start()

    def _watch(self) -> None:
        while True:
            key = f"entry/{len(self._entries)}"
            try:
                self._watched.wait([key], timedelta(days=1))
                entry = Entry(*json.loads(self._watched.get(key)))
            except dist.DistError:
                time.sleep(1)  # the host is gone, and this process will follow; or a day has passed
                continue
            if (entry.kind, entry.name) == ("lost", self._name):
                os._exit(FENCED)
            with self._changed:
                self._entries.append(entry)
                self._roster = Roster(self._entries, self.world_size)
                self._changed.notify_all()

    def _is_lost(self) -> bool:
        return self._roster.lost > self._generation

    def _has_changed(self) -> bool:
        return self._roster.changed > self._generation

    def ask(self, on_wait: Callable[[], None]) -> bool:
        """Ask for the place of a lost rank, once there is one; `join` is next.

        Args:
            on_wait: called once if no rank is lost yet.

        Returns:
            Whether this process had to wait for a rank to be lost.

        Raises:
            NotReplacedError: nobody may join any more.
        """
        waited = False
        while True:
            with self._changed:
                self.is_idle = not (self._roster.vacant or self._roster.gave_up)
                if self.is_idle and not waited:
                    waited = True
                    on_wait()
                self._changed.wait_for(lambda: self._roster.vacant or self._roster.gave_up)
                self.is_idle = False
                if self._roster.gave_up:
                    raise NotReplacedError("no lost rank is replaced any more")
                self.rank, known = self._roster.vacant[0], len(self._entries)
            # Nobody else has asked if no entry came in between.
            if append(self._store, Entry("asks", self._name, self.rank), at=known):
                return waited
            with self._changed:
                self._changed.wait_for(lambda known=known: len(self._entries) > known)  # type: ignore[misc]

    def join(self) -> None:
        """Wait until the others admit this process, which has asked; `agree` is next."""
        with self._changed:
            self.is_idle = True
            self._changed.wait_for(lambda: self._name in self._roster.members)
            self.is_idle = False

    def begin_rehearsal(self) -> None:
        """Note that until the first step, this rank joins in no calls but those that it can leave out."""
        if not self.joins:
            note_rehearsal(self._store)

    def leave_calls(self) -> None:
        """End what this rank has begun with a lost one, so that the GPU goes on. Calls raise until `agree` is next."""
        if self._nccl is not None:
            self._nccl.abort()

    @property
    def asking(self) -> int:
        """The number of processes that ask to be admitted."""
        return len(self._roster.asking)

    def admit(self, *, first: bool) -> None:
        """Admit the processes that ask. All members must call it at the same step; `agree` is next.

        Others may agree on an earlier loss first, but they cannot do so without the first member. It waits for this
        entry: it must not be known later, when those that it admits are in an agreement with it.

        Args:
            first: whether this is the first member, which does so for all.
        """
        entry = Entry("admits", secrets.token_hex(4))
        if first:
            append(self._store, entry)
        with self._changed:
            self._changed.wait_for(lambda: entry in self._entries if first else self._has_changed())

    @property
    def is_complete(self) -> bool:
        """True if all ranks were members at the last agreement."""
        return len(self.members) == self.world_size

    def wait_until_complete(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all lost ranks could be replaced, and return True; or False if nobody replaces them any more.

        All members that ask at the same step get the same answer.

        Args:
            gives_up: called every second; if it returns True, nobody replaces them any more.
        """
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._roster.vacant or self._roster.gave_up, timeout=1):
                    return not self._roster.vacant
                self.seconds_awaited += 1
            if gives_up():
                give_up(self._store)

    def end(self) -> None:
        """Tell processes that wait for a place that there will be none, since the run is over."""
        give_up(self._store)

    def check(self) -> None:
        """Do nothing, unless ranks are lost.

        Raises:
            RankLostError: they are.
        """
        with self._changed:
            if self._is_lost():
                raise RankLostError

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until a function, which does not block, returns True. It must do so unless a rank is lost.

        Raises:
            RankLostError: ranks were lost before.
        """
        while not is_done():
            self.check()
            time.sleep(_POLL_GPU_SECONDS)

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that may block because a rank is lost. It runs in another thread.

        Raises:
            RankLostError: ranks were lost. The function may still be running: nobody may use what it changes.
        """
        self.check()
        outcomes: list[tuple[T | None, Exception | None]] = []

        def run() -> None:
            try:
                outcome: tuple[T | None, Exception | None] = function(), None
            except Exception as error:
                outcome = None, error
            with self._changed:
                outcomes.append(outcome)
                self._changed.notify_all()

        Thread(target=run, daemon=True, name="collective").start()
        with self._changed:
            self._changed.wait_for(lambda: outcomes or self._is_lost())
            if not outcomes:
                raise RankLostError
            ((value, error),) = outcomes
            if error is None:
                return value  # type: ignore[return-value]  # the function returned it
            # The connection to a lost rank breaks before the loss is announced.
            if not self._changed.wait_for(self._is_lost, GRACE_SECONDS):
                raise error
        raise RankLostError from error

    def agree(self, report: dict[str, Any]) -> tuple[list[dict[str, Any]], Groups]:
        """Agree with the other members on who they are, and connect with them.

        Args:
            report: what this rank tells the others, as JSON can represent it.

        Returns:
            The reports of `members`, in their order, and the new process groups of these ranks.
        """
        while True:
            self.leave_calls()  # what this rank does next would wait behind NCCL's kernels
            with self._changed:
                self._generation = self._roster.changed
                roster = Roster(self._entries[: self._generation], self.world_size)
                self.members = tuple(roster.members.values())
            try:
                return self._exchange(report), self.call(self._groups)
            except RankLostError:
                continue

    def _exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [f"report/{self._generation}/{rank}" for rank in self.members]
        self._store.set(keys[self.members.index(self.rank)], json.dumps(report))
        while not self._store.check(keys):
            with self._changed:
                if self._changed.wait_for(self._has_changed, _POLL_SECONDS):
                    raise RankLostError
        return [json.loads(self._store.get(key)) for key in keys]

    def _connect_ahead(self) -> Future[Store]:
        """Begin to connect for the next group: torch asks the DNS for a name then, which may take seconds."""
        ahead = Future[Store]()

        def connect() -> None:
            try:
                ahead.set_result(self._connect())
            except Exception as error:
                ahead.set_exception(error)

        Thread(target=connect, daemon=True, name="connection").start()
        return ahead

    def _groups(self) -> Groups:
        ahead, self._ahead = self._ahead, self._connect_ahead()
        store = PrefixStore(f"group/{self._generation}", ahead.result())
        values: Any = dist.ProcessGroupGloo(store, self.members.index(self.rank), len(self.members), self._timeout)
        return Groups(values, self._gradients(ahead.result()))  # a backend has the interface of a group

    def first_gradients(self) -> dist.ProcessGroup | None:
        """Return the group of gradients of all ranks at the beginning; see Groups."""
        return self._gradients(self._connect())

    def _gradients(self, connection: Store) -> dist.ProcessGroup | None:
        if self._nccl is None:
            return None
        store = PrefixStore(f"gradients/{self._generation}", connection)
        return self._nccl.connect(store, self.members.index(self.rank), len(self.members))
