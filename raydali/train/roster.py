"""The list of changes of a group of ranks, in a store outside of all of them, and the group that follows from it.

    lost      its host says that a process has ended, or that it takes it for dead (`announce_loss`)
    asks      a process asks to take the place of a lost rank (`Membership.join`)
    admits    the first member admits those that have asked, between two steps (`Membership.admit`)
    gives up  nobody takes the place of a lost rank any more (`give_up`)

Processes have names, and ranks are their places: a process that waits for a place, a spare, has none yet. The group
changes with an entry that loses a member or admits one.
"""

import json
from collections.abc import Iterable
from itertools import count
from typing import Literal, NamedTuple

from torch.distributed.distributed_c10d import Store

_REHEARSING = "rehearsing"


class Entry(NamedTuple):
    """A change; equal entries are one."""

    kind: Literal["lost", "asks", "admits", "gives up"]
    name: str = ""
    """The process; of "admits" a random text."""
    rank: int = -1


def announce_loss(store: Store, name: str) -> None:
    """Tell all ranks that a process is lost. Its name must not be used again."""
    append(store, Entry("lost", name))


def give_up(store: Store) -> None:
    """Tell all processes that nobody takes the place of a lost rank any more."""
    append(store, Entry("gives up"))


def note_rehearsal(store: Store) -> None:
    """Note that a rank begins its rehearsal: from now on until its first step, the others can go on without it."""
    store.add(_REHEARSING, 1)


def all_rehearse(store: Store, world_size: int) -> bool:
    """Return whether all first ranks have begun their rehearsal."""
    return store.add(_REHEARSING, 0) >= world_size


def ranks_of(store: Store, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ranks of the members by the entries of now, by name, and those that processes ask for."""
    entries: list[Entry] = []
    while store.check([f"entry/{len(entries)}"]):
        entries.append(Entry(*json.loads(store.get(f"entry/{len(entries)}"))))
    roster = Roster(entries, world_size)
    return roster.members, roster.asking


class Roster:
    """The group after some entries.

    Attributes:
        members: the rank of each member by its name; those that joined come last.
        asking: the ranks that processes have asked for since, by their names.
        changed, lost: the number of entries up to the newest one that changes the group, and that loses a member.
        gave_up: whether nobody may ask any more.
    """

    def __init__(self, entries: Iterable[Entry], world_size: int) -> None:
        self.members = {str(rank): rank for rank in range(world_size)}
        self.asking: dict[str, int] = {}
        self.changed = self.lost = 0
        self.gave_up = False
        self._world_size = world_size
        gone: set[str] = set()
        for number, (kind, name, rank) in enumerate(entries, 1):
            if kind == "asks" and name not in gone:
                self.asking[name] = rank
            self.gave_up |= kind == "gives up"
            if kind == "lost":
                gone.add(name)
                self.asking.pop(name, None)
                if self.members.pop(name, None) is None:
                    continue  # it had no place
                self.lost = number
            if kind in ("lost", "admits"):
                self.members |= self.asking
                self.asking, self.changed = {}, number

    @property
    def vacant(self) -> list[int]:
        """The ranks that no process has or asks for."""
        taken = {*self.members.values(), *self.asking.values()}
        return [rank for rank in range(self._world_size) if rank not in taken]


def append(store: Store, entry: Entry, at: int | None = None) -> bool:
    """Append an entry, unless another one is at this index, if one is given; return whether it is there."""
    content = json.dumps(entry)
    for index in count() if at is None else [at]:
        if store.compare_set(f"entry/{index}", "", content).decode() == content:
            return True
    return False
