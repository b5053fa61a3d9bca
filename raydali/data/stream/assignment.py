"""An assignment says which rank takes which micro-batches, also after ranks are lost or replaced.

Rank r of W takes micro-batches r, r + W, ... of each global batch. After a change, the ranks that stay keep what their
loaders have begun to load, and share out what lost ranks had there. From the first global batch of which nobody has
loaded anything, the members take turns as if they had been all ranks. This depends on the changes alone, so all members
compute it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """A change of the ranks that train together: some are lost, or replaced by others of the same number.

    Attributes:
        members: the ranks after the change, in ascending order.
        step: the first global batch that is not trained on.
        loaded: the first global batch of which no member has begun to load a micro-batch.
        joined: the members that are new, and have loaded nothing.
    """

    members: tuple[int, ...]
    step: int
    loaded: int
    joined: tuple[int, ...] = ()

    @property
    def stayed(self) -> tuple[int, ...]:
        """The members that were there before."""
        return tuple(rank for rank in self.members if rank not in self.joined)


class Assignment(Iterator[T]):
    """A rank's micro-batches in the order in which its loader loads them. A loader may take them in any thread.

    Those that it takes over from a lost rank come next, although they may belong to earlier global batches. Such an
    iterator can go on after its end.

    Args:
        make: makes a micro-batch of the number of its global batch and its index there.
        steps: number of global batches.
        per_step: number of micro-batches of a global batch.
        rank: this rank.
        world_size: the number of ranks at the beginning.
        start: the first global batch.

    Attributes:
        changes: the changes so far.
    """

    def __init__(
        self, make: Callable[[int, int], T], steps: int, per_step: int, rank: int, world_size: int, start: int = 0
    ) -> None:
        self._make, self._steps, self._per_step, self._rank = make, steps, per_step, rank
        self._members = tuple(range(world_size))
        self.changes: list[Change] = []
        self._lock = Lock()
        self._next = start, 0  # global batch and place in it, of this rank's turns
        self._taken_over: deque[tuple[int, int]] = deque()

    def __next__(self) -> T:
        with self._lock:
            if self._taken_over:
                return self._make(*self._taken_over.popleft())
            step, place = self._next
            while step < self._steps:
                turns, _ = self._turns(step, self.changes)
                for index in range(place, len(turns)):
                    if turns[index] == self._rank:
                        self._next = step, index + 1
                        return self._make(step, index)
                step, place = step + 1, 0
            self._next = step, 0
            raise StopIteration

    def of_step(self, step: int) -> list[int]:
        """Return the indices of the micro-batches of a global batch that this rank takes."""
        return [index for index, owner in enumerate(self._owners(step, self.changes)) if owner == self._rank]

    def pause(self) -> int:
        """Let loaders wait until `resume`; return the first global batch of which this rank has loaded nothing."""
        self._lock.acquire()
        step, place = self._next
        return step + (place > 0)

    def resume(self, changes: list[Change]) -> None:
        """Take over what these changes, which begin with the known ones, assign to this rank; end `pause`."""
        for known in range(len(self.changes), len(changes)):
            for step in range(changes[known].step, changes[known].loaded):
                owners = self._owners(step, changes[:known]), self._owners(step, changes[: known + 1])
                changed = (index for index, (old, new) in enumerate(zip(*owners, strict=True)) if old != new)
                self._taken_over += [(step, index) for index in changed if owners[1][index] == self._rank]
        self.changes = changes
        self._lock.release()

    def of_lost_ranks(self, start: int, end: int) -> Iterator[tuple[int, T]]:
        """Yield the micro-batches of these global batches whose rank trained on them and was lost later, with it."""
        for step in range(start, end) if self.changes else ():
            later = [change.stayed for change in self.changes if change.step > step]
            for index, owner in enumerate(self._owners(step, self.changes)):
                if any(owner not in stayed for stayed in later):
                    yield owner, self._make(step, index)

    def _turns(self, step: int, changes: list[Change]) -> tuple[list[int], list[Change]]:
        """Return the rank of each micro-batch by the order of turns, and the changes that this does not consider."""
        members, later = self._members, changes
        for index, change in enumerate(changes):
            if change.loaded <= step:
                members, later = change.members, changes[index + 1 :]
        return [members[index % len(members)] for index in range(self._per_step)], later

    def _owners(self, step: int, changes: list[Change]) -> list[int]:
        """Return the rank of each micro-batch after these changes."""
        owners, later = self._turns(step, changes)
        for stayed in (change.stayed for change in later if change.step <= step):
            owners = [
                owner if owner in stayed else stayed[(step + index) % len(stayed)] for index, owner in enumerate(owners)
            ]
        return owners
