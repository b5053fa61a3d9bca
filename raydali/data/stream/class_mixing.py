"""Chooses how many blocks are mixed when data that is sorted by class is shuffled in blocks.

A block of neighbours is of one class there, and a global batch of few blocks of few classes. So blocks are counted by
the labels, on orders as they will be: milliseconds for a million samples.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.permutation import WINDOW_BLOCKS
from raydali.data.stream.stream import Stream

Labels = NDArray[np.int64]

ENOUGH = 0.95
"""Of the classes that a global batch of a full shuffle holds."""
USEFUL = 0.25
"""Maximum share of the data in a window: with more, neighbours are read too far apart in time to gain from it."""
_BLOCKS = 1024, 256, 64
"""What is advised, the largest first."""
_BATCHES, _IDS = 9, 1 << 18
"""Number of global batches that are counted, three if they are large; the result is their median."""


@dataclass(frozen=True)
class ClassMixing:
    """Classes in a global batch, the median: as it is shuffled, and as it would be with all samples at once."""

    in_blocks: int
    in_full: int

    @classmethod
    def of(cls, labels: Labels, stream: Stream) -> "ClassMixing":
        """Count the classes of a stream of samples with these labels (N,)."""
        return cls(_classes(labels, stream), _classes(labels, replace(stream, shuffle_block=0)))

    @property
    def is_enough(self) -> bool:
        """True if blocks cost hardly any classes per global batch."""
        return self.in_blocks >= ENOUGH * self.in_full


def fitting_window(labels: Labels | None, stream: Stream) -> int:
    """The `shuffle_window` that a stream in blocks needs.

    It is 0 if blocks from anywhere mix the classes well enough, and for samples without labels; else the smallest
    number of blocks, spread over the data, that is enough, or all of them.
    """
    if labels is None:
        return 0
    window, blocks = 0, -(-stream.samples // stream.shuffle_block)
    while not ClassMixing.of(labels, replace(stream, shuffle_window=window)).is_enough and window < blocks:
        window = 2 * max(window, WINDOW_BLOCKS)
    return window


def is_useful(stream: Stream) -> bool:
    """Return whether the blocks of a stream keep neighbours near each other."""
    return (stream.shuffle_window or WINDOW_BLOCKS) * stream.shuffle_block <= USEFUL * stream.samples


def useful_block(labels: Labels | None, stream: Stream) -> int:
    """The largest `shuffle_block` that can be advised for a stream: with the window that it needs it is useful.

    0: none.
    """
    if labels is None:
        return _BLOCKS[0]
    in_blocks = (replace(stream, shuffle_block=block) for block in _BLOCKS)
    mixed = (replace(blocks, shuffle_window=fitting_window(labels, blocks)) for blocks in in_blocks)
    return next((blocks.shuffle_block for blocks in mixed if is_useful(blocks)), 0)


def _classes(labels: Labels, stream: Stream) -> int:
    size, order = stream.global_batch_size, stream.order(0)
    count = max(3, min(_BATCHES, _IDS // size))
    starts = np.linspace(0, stream.samples - size, count).astype(np.int64).tolist()
    return int(np.median([len(np.unique(labels[order(np.arange(start, start + size))])) for start in starts]))
