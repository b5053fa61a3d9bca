"""Ranks that train together hear of a loss, leave the call that it blocks, and agree on who remains.

A store outside of all ranks, for example in the process that started them, has the list of lost ranks. Its host appends
a rank that has ended, or that it takes for dead (`announce`). The length of the list is the generation of the group. So
all ranks see losses in one order, and an agreement that a further loss interrupts starts again in the next generation.

A loss is only known at the call that it blocks: a rank whose call returned goes on, and hears of the loss at its next
one. Therefore ranks are at most one step apart.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from threading import Condition, Thread
from typing import Any, TypeVar

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


def announce(store: Store, losses: int, rank: int) -> None:
    """Tell all ranks that a rank is lost.

    Args:
        store: the store of all ranks.
        losses: number of ranks that were announced before.
        rank: the lost rank, by its number at the beginning.
    """
    store.set(f"lost/{losses}", str(rank))


class Membership:
    """The ranks that train together, as seen by one of them.

    Args:
        connect: returns a new connection to the store. A call that was left may use its connection for long.
        rank: this rank.
        world_size: number of ranks at the beginning.

    Attributes:
        rank: this rank, by its number at the beginning.
        members: the remaining ranks at the last agreement, by their numbers at the beginning.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, world_size: int) -> None:
        self._connect, self._store, self._watched = connect, connect(), connect()
        self.rank, self._world_size = rank, world_size
        self.members = tuple(range(world_size))
        self._lost: list[int] = []
        self._generation = 0
        self._changed = Condition()
        Thread(target=self._watch, daemon=True, name="membership").start()

    def _watch(self) -> None:
        while True:
            key = f"lost/{len(self._lost)}"
            try:
                self._watched.wait([key], timedelta(days=1))
            except dist.DistStoreError:
                continue
            lost = int(self._watched.get(key))
            if lost == self.rank:
                os._exit(FENCED)
            with self._changed:
                self._lost.append(lost)
                self._changed.notify_all()

    def _has_news(self) -> bool:
        return len(self._lost) > self._generation

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
            self._changed.wait_for(lambda: outcomes or self._has_news())
            if not outcomes:
                raise RankLostError
            ((value, error),) = outcomes
            if error is None:
                return value  # type: ignore[return-value]  # the function returned it
            # The connection to a lost rank breaks before the loss is announced.
            if not self._changed.wait_for(self._has_news, GRACE_SECONDS):
                raise error
        raise RankLostError from error

    def agree(self, report: dict[str, Any], timeout: timedelta) -> tuple[list[dict[str, Any]], dist.ProcessGroup]:
        """Agree with the other remaining ranks on who remains, and connect with them.

        Args:
            report: what this rank tells the others, as JSON can represent it.
            timeout: the timeout of the new group's calls.

        Returns:
            The reports of `members`, in their order, and the new process group of these ranks, with gloo.
        """
        while True:
            with self._changed:
                self._generation = len(self._lost)
                self.members = tuple(rank for rank in range(self._world_size) if rank not in self._lost)
            try:
                return self._exchange(report), self.call(lambda: self._group(timeout))
            except RankLostError:
                continue

    def _exchange(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [f"report/{self._generation}/{rank}" for rank in self.members]
        self._store.set(keys[self.members.index(self.rank)], json.dumps(report))
        while not self._store.check(keys):
            with self._changed:
                if self._changed.wait_for(self._has_news, _POLL_SECONDS):
                    raise RankLostError
        return [json.loads(self._store.get(key)) for key in keys]

    def _group(self, timeout: timedelta) -> dist.ProcessGroup:
        store = PrefixStore(f"group/{self._generation}", self._connect())
        group: Any = dist.ProcessGroupGloo(store, self.members.index(self.rank), len(self.members), timeout)
        return group  # type: ignore[no-any-return]  # a backend has the interface of a group
