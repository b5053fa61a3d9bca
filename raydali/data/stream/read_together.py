"""Computes how much an order reads for samples that can only be read with their neighbours, as rows of a row group."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.stream import Stream

_IDS = 1 << 17
"""Number of samples, of a process, whose reads are counted; all of its first epoch if that has fewer."""


@dataclass(frozen=True)
class ReadTogether:
    """N samples in G groups, each of which is read as a whole.

    Attributes:
        groups: int64 (N,), the group of each sample.
        group_bytes: int64 (G,).
        sample_bytes: int64 (N,), of each sample, at least the mean of its group.
        kept_bytes: the groups that a process keeps once it has read them.
    """

    groups: NDArray[np.int64]
    group_bytes: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    kept_bytes: int

    @property
    def fits(self) -> bool:
        """True if a process can keep all groups."""
        return int(self.group_bytes.sum()) <= self.kept_bytes

    @property
    def samples_per_group(self) -> int:
        """The median number of samples of a group."""
        return int(np.median(np.bincount(self.groups)))

    def amplification(self, stream: Stream, world_size: int, processes: int = 1) -> float:
        """Return how many bytes a process of the first rank reads for a byte of its samples.

        Args:
            stream: the order.
            world_size: the number of ranks.
            processes: of a rank, which take its micro-batches in turn.
        """
        lanes = np.arange(0, stream.micro_batches_per_step, world_size) * stream.batch_size
        steps = np.arange(max(1, stream.samples // stream.global_batch_size)) * stream.global_batch_size
        starts = (steps[:, None] + lanes).ravel()[::processes][: max(1, _IDS // stream.batch_size)]
        ids = stream.order(0)(starts[:, None] + np.arange(stream.batch_size))
        kept, kept_bytes, read = OrderedDict[int, int](), 0, 0
        for batch in self.groups[ids]:
            for group in np.unique(batch).tolist():
                if group in kept:
                    kept.move_to_end(group)
                    continue
                kept[group] = size = int(self.group_bytes[group])
                read += size
                kept_bytes += size
                while kept_bytes > self.kept_bytes and len(kept) > 1:
                    kept_bytes -= kept.popitem(last=False)[1]
        return read / float(self.sample_bytes[ids].sum())
