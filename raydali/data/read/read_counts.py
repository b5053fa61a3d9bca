"""Counts of what a process has read from buckets and from caches, for the record of an epoch."""

import os
import threading
from dataclasses import asdict, dataclass, replace


@dataclass
class Counts:
    """A process counts here what it has read from buckets since its counts were taken away.

    Attributes:
        requests, bytes: answers of buckets and their bytes.
        repeated: requests that were refused or broken, and repeated at once.
        hits, peer_hits: reads that the cache of this node, and the cache of another node, answered.
        damaged: entries of a cache that were not what had been written.
    """

    requests: int = 0
    bytes: int = 0
    repeated: int = 0
    hits: int = 0
    peer_hits: int = 0
    damaged: int = 0


class _Counter:
    def __init__(self) -> None:
        self._reset_after_fork()
        os.register_at_fork(after_in_child=self._reset_after_fork)  # a thread of the parent may hold its lock

    def _reset_after_fork(self) -> None:
        self._lock, self._counts = threading.Lock(), Counts()

    def add(self, **more: int) -> None:
        """Add to counts by their names."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)

    def so_far(self) -> Counts:
        """Return the counts."""
        with self._lock:
            return replace(self._counts)

    def take(self) -> Counts:
        """Return the counts, which begin at zero again."""
        taken = self.so_far()
        self.take_away(taken)
        return taken

    def take_away(self, recorded: Counts) -> None:
        """Subtract counts that have been recorded: reads go on meanwhile."""
        self.add(**{name: -number for name, number in asdict(recorded).items()})


COUNTS = _Counter()
