"""Ranks that train together hear of losses, leave the call that these block, and agree on who they are.

A store outside of all ranks, in the process that starts them, has a list of entries:

    lost      its host says that a rank has ended, or that it takes it for dead (`announce_loss`)
    asks      a process asks to replace a lost rank (`Membership.join`)
    admits    the first member admits those that have asked, between two steps (`Membership.admit`)
    gives up  its host says that it replaces no lost rank any more (`give_up`)

The group changes with an entry that loses a rank or admits one. So all ranks see changes in one order, and an agreement
that a further change interrupts starts again. Only losses interrupt calls, at different places in different ranks: a
rank whose call returned goes on, and hears of the loss at its next one. Therefore ranks are at most one step apart.
Those that ask are admitted after a loss, too.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from threading import Condition, Thread
from typing import Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")

FENCED = 75
"""Exit code of a rank that was declared lost, and is alive: the others go on without it."""
GRACE_SECONDS = 30.0
"""Time from a broken connection to the announcement of the loss; without one, the error is no loss."""
_POLL_SECONDS = 0.005


class RankLostError(Exception):
    """Ranks were lost, which interrupted this call. `Membership.agree` is next."""

    def __init__(self) -> None:
        super().__init__("other ranks of this run were lost")


class NotReplacedError(Exception):
    """Ranks are lost, and nobody replaces them any more."""


class _Entry(NamedTuple):
    kind: Literal["lost", "asks", "admits", "gives up"]
    rank: int = -1
    name: str = ""
    """Distinguishes entries of equal content."""


def announce_loss(store: Store, rank: int) -> None:
    """Tell all ranks that a rank is lost."""
    _append(store, _Entry("lost", rank, secrets.token_hex(4)))


def give_up(store: Store) -> None:
    """Tell all ranks that nobody replaces lost ranks any more."""
    _append(store, _Entry("gives up"))


def members_of(store: Store, world_size: int) -> list[int]:
    """Return the ranks that are members by the entries of now; those that were lost and not yet replaced are not."""
    entries: list[_Entry] = []
    while store.check([f"entry/{len(entries)}"]):
        entries.append(_Entry(*json.loads(store.get(f"entry/{len(entries)}"))))
    return _replayed(entries, world_size)[0]


def _replayed(entries: Iterable[_Entry], world_size: int) -> tuple[list[int], list[int]]:
    """Return the members after these entries, and the ranks that have asked since."""
    members, asking = [*range(world_size)], list[int]()
    for entry in entries:
        if entry.kind == "asks":
            asking.append(entry.rank)
        if entry.kind == "lost":
            members, asking = ([rank for rank in ranks if rank != entry.rank] for ranks in (members, asking))
        if entry.kind in ("lost", "admits"):
            members, asking = [*members, *asking], []
    return members, asking


def _append(store: Store, entry: _Entry) -> bool:
    """Append an entry; nobody can ask any more after the host gave up."""
    content = json.dumps(entry)
    for index in count():
        there = store.compare_set(f"entry/{index}", "", content).decode()
        if there == content:
            return True
        if entry.kind == "asks" and _Entry(*json.loads(there)).kind == "gives up":
            return False
    raise AssertionError  # the loop has no end


class Membership:
    """The ranks that train together, as seen by one of them.

    Args:
        connect: returns a new connection to the store. A call that was left may use its connection for long.
        rank: this rank.
        world_size: number of ranks at the beginning.
        joins: whether this process replaces a lost one of this rank.
        timeout: the timeout of the calls of new process groups.

    Attributes:
        joins: see the argument.
        rank: this rank, by its number at the beginning.
        members: the ranks at the last agreement, by their numbers at the beginning; replacements come last.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        world_size: int,
        *,
        joins: bool = False,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self._connect, self._store, self._watched = connect, connect(), connect()
        self.rank, self._world_size, self.joins = rank, world_size, joins
        self.members, self._timeout = tuple(range(world_size)), timeout
        self._asked: _Entry | None = _Entry("asks", rank, secrets.token_hex(8)) if joins else None
        self._entries: list[_Entry] = []
        self._generation = 0
        self._changed = Condition()
        Thread(target=self._watch, daemon=True, name="membership").start()

    def _watch(self) -> None:
        while True:
            key = f"entry/{len(self._entries)}"
            try:
                self._watched.wait([key], timedelta(days=1))
                entry = _Entry(*json.loads(self._watched.get(key)))
            except dist.DistError:
                time.sleep(1)  # the host is gone, and this process will follow; or a day has passed
                continue
            is_other_life = self._asked is not None and self._asked not in self._entries
            if (entry.kind, entry.rank) == ("lost", self.rank) and not is_other_life:
                os._exit(FENCED)
            with self._changed:
                self._entries.append(entry)
                self._changed.notify_all()

    def _changes_since(self, kinds: tuple[str, ...] = ("lost", "admits")) -> bool:
        return any(entry.kind in kinds for entry in self._entries[self._generation :])

    def _is_lost(self) -> bool:
        return self._changes_since(("lost",))

    def _newest(self) -> int:
        """Return the number of entries up to the newest one that changes the group."""
        changes = [number for number, entry in enumerate(self._entries, 1) if entry.kind in ("lost", "admits")]
        return max(changes, default=0)

    def join(self) -> None:
        """Ask to become a member, and wait until the others admit this process; `agree` is next.

        Raises:
            NotReplacedError: nobody may join any more.
        """
        assert self._asked is not None
        asked = self._asked
        if not _append(self._store, asked):
            raise NotReplacedError
        with self._changed:
            self._changed.wait_for(
                lambda: asked in self._entries and self._newest() > self._entries.index(asked),
            )

    @property
    def asking(self) -> int:
        """The number of processes that ask to be admitted."""
        with self._changed:
            return len(_replayed(self._entries, self._world_size)[1])

    def admit(self, *, first: bool) -> None:
        """Admit the processes that ask. All members must call it at the same step; `agree` is next.

        Args:
            first: whether this is the first member, which does so for all.
        """
        if first:
            _append(self._store, _Entry("admits", name=secrets.token_hex(4)))
        with self._changed:
            self._changed.wait_for(self._changes_since)

    @property
    def is_complete(self) -> bool:
        """True if all ranks were members at the last agreement."""
        return len(self.members) == self._world_size

    def wait_until_complete(self) -> bool:
        """Wait until all lost ranks could be replaced, and return True; or False if nobody replaces them any more.

        All members that ask at the same step get the same answer.
        """

        def could_be() -> bool:
            return sum(map(len, _replayed(self._entries, self._world_size))) == self._world_size

        with self._changed:
            self._changed.wait_for(lambda: could_be() or any(entry.kind == "gives up" for entry in self._entries))
            return could_be()

    def check(self) -> None:
        """Do nothing, unless ranks are lost.

        Raises:
            RankLostError: they are.
        """
        with self._changed:
            if self._is_lost():
                raise RankLostError

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that may block because a rank is lost. It runs in another thread.

        Raises:
            RankLostError: ranks were lost. The function may still be running: nobody may use what it changes.
        """
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

    def agree(self, report: dict[str, Any]) -> tuple[list[dict[str, Any]], dist.ProcessGroup]:
        """Agree with the other members on who they are, and connect with them.

        Args:
            report: what this rank tells the others, as JSON can represent it.

        Returns:
            The reports of `members`, in their order, and the new process group of these ranks, with gloo.
        """
        while True:
            with self._changed:
                self._generation = self._newest()
                self.members = tuple(_replayed(self._entries[: self._generation], self._world_size)[0])
            try:
                return self._exchange(report), self.call(self._group)
            except RankLostError:
                continue

    def _exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [f"report/{self._generation}/{rank}" for rank in self.members]
        self._store.set(keys[self.members.index(self.rank)], json.dumps(report))
        while not self._store.check(keys):
            with self._changed:
                if self._changed.wait_for(self._changes_since, _POLL_SECONDS):
                    raise RankLostError
        return [json.loads(self._store.get(key)) for key in keys]

    def _group(self) -> dist.ProcessGroup:
        store = PrefixStore(f"group/{self._generation}", self._connect())
        group: Any = dist.ProcessGroupGloo(store, self.members.index(self.rank), len(self.members), self._timeout)
        return group  # type: ignore[no-any-return]  # a backend has the interface of a group
