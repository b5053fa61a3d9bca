"""An assignment says which rank takes which micro-batches, also after ranks are lost.

Rank r of W takes micro-batches r, r + W, ... of each global batch. After a loss, the survivors keep what their loaders
have begun to load, and share out what the lost ranks had there. From the first global batch of which nobody has loaded
anything, they take turns as if they had been all ranks. This depends on the losses alone, so all survivors compute it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Loss:
    """A loss of ranks.

    Attributes:
        members: the ranks that remain, by their numbers at the beginning.
        step: the first global batch that is not trained on.
        loaded: the first global batch of which no remaining rank has begun to load a micro-batch.
    """

    members: tuple[int, ...]
    step: int
    loaded: int


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
    """

    def __init__(
        self, make: Callable[[int, int], T], steps: int, per_step: int, rank: int, world_size: int, start: int = 0
    ) -> None:
        self._make, self._steps, self._per_step, self._rank = make, steps, per_step, rank
        self._members = tuple(range(world_size))
        self.losses: list[Loss] = []
        self._lock = Lock()
        self._next = start, 0  # global batch and place in it, of this rank's turns
        self._taken_over: deque[tuple[int, int]] = deque()

    def __next__(self) -> T:
        with self._lock:
            if self._taken_over:
                return self._make(*self._taken_over.popleft())
            step, place = self._next
            while step < self._steps:
                turns, _ = self._turns(step, self.losses)
                for index in range(place, len(turns)):
                    if turns[index] == self._rank:
                        self._next = step, index + 1
                        return self._make(step, index)
                step, place = step + 1, 0
            self._next = step, 0
            raise StopIteration

    def of_step(self, step: int) -> list[int]:
        """Return the indices of the micro-batches of a global batch that this rank takes."""
        return [index for index, owner in enumerate(self._owners(step, self.losses)) if owner == self._rank]

    def pause(self) -> int:
        """Let loaders wait until `resume`; return the first global batch of which this rank has loaded nothing."""
        self._lock.acquire()
        step, place = self._next
        return step + (place > 0)

    def resume(self, losses: list[Loss]) -> None:
        """Take over what these losses, which begin with the known ones, assign to this rank; end `pause`."""
        for known in range(len(self.losses), len(losses)):
            for step in range(losses[known].step, losses[known].loaded):
                owners = self._owners(step, losses[:known]), self._owners(step, losses[: known + 1])
                changed = (index for index, (old, new) in enumerate(zip(*owners, strict=True)) if old != new)
                self._taken_over += [(step, index) for index in changed if owners[1][index] == self._rank]
        self.losses = losses
        self._lock.release()

    def _turns(self, step: int, losses: list[Loss]) -> tuple[list[int], list[Loss]]:
        """Return the rank of each micro-batch by the order of turns, and the losses that this does not consider."""
        members, later = self._members, losses
        for index, loss in enumerate(losses):
            if loss.loaded <= step:
                members, later = loss.members, losses[index + 1 :]
        return [members[index % len(members)] for index in range(self._per_step)], later

    def _owners(self, step: int, losses: list[Loss]) -> list[int]:
        """Return the rank of each micro-batch after these losses."""
        owners, later = self._turns(step, losses)
        for members in (loss.members for loss in later if loss.step <= step):
            owners = [
                owner if owner in members else members[(step + index) % len(members)]
                for index, owner in enumerate(owners)
            ]
        return owners
