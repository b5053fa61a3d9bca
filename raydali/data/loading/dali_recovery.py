"""Finds the samples on which a graph of one's own fails, although their files can be decoded.

DALI reports only that a batch failed. The batches in flight are therefore run again in smaller and smaller parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from raydali.data.stream.stream import MicroBatch

MAX_LOADS = 100
"""Batches that are tried. If more are needed, the cause is another one, such as the GPU's memory."""

Keys = Sequence[tuple[int, int]]
"""Pairs of id and the key of its draws: its epoch and its repeat."""


def failing(keys: Iterable[tuple[int, int]], loads: Callable[[Keys], bool]) -> list[int]:
    """Return the ids of the samples that fail in a batch of one; an empty list if MAX_LOADS tries do not suffice.

    Args:
        keys: of the samples.
        loads: whether these samples can be loaded as one batch.
    """
    found: list[int] = []
    waiting, tried = [[*dict.fromkeys(keys)]], 0
    while waiting and tried < MAX_LOADS:
        part, tried = waiting.pop(), tried + 1
        if loads(part):
            continue
        if len(part) == 1:
            found.append(part[0][0])
        else:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
    return [] if waiting else [*dict.fromkeys(found)]


class Once:
    """An order of one micro-batch."""

    def __init__(self, keys: Keys) -> None:
        ids, epochs = np.array(keys).T
        self.samples, self._micro_batch = len(ids), MicroBatch(0, 0, 0, ids, epochs)

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the one micro-batch."""
        yield self._micro_batch


def keys_of(micro_batches: Iterable[MicroBatch]) -> list[tuple[int, int]]:
    """Return the ids that are read, substitutes included, with the keys of their draws."""
    return [key for one in micro_batches for key in zip(one.read_ids.tolist(), one.draw_keys.tolist(), strict=True)]
