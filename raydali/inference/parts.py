"""The unit of work of inference: a part is a range of ids, which one worker does as a whole.

    ids       0 ......................................... N-1
    parts     |0      |1      |2      |3      |4      |5   |
    batches   |  |  | |  |  | |                               never across two parts

How a source is cut depends on its size and the batch size alone. A result is therefore the same on any number of
workers, to the last bit on equal devices, and a part that is done need not be done again after a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.stream import MicroBatch

LEAST_PARTS, MOST_PARTS = 64, 4096
"""Enough for any number of workers to share; few enough for one file for each."""
USUAL_SAMPLES = 2048
"""Samples of a part of a large source: what is lost when a worker fails."""


class Part(NamedTuple):
    """A range of ids.

    Attributes:
        number: its place in the source.
        ids: the range.
    """

    number: int
    ids: range


def cut(samples: int, batch_size: int, edges: NDArray[np.int64] | None = None) -> list[Part]:
    """Cut a source into parts of whole batches.

    Args:
        samples: N, the size of the source.
        batch_size: samples of a batch.
        edges: ids at which parts may begin, ascending from 0. Default: at any batch.
    """
    batches = -(-samples // batch_size)
    each = max(1, min(batches // LEAST_PARTS, max(USUAL_SAMPLES // batch_size, batches // MOST_PARTS)))
    begins = np.arange(0, samples, each * batch_size)
    if edges is not None:
        begins = np.unique(edges[np.searchsorted(edges, begins)[begins <= edges[-1]]])
    ends = [*begins[1:].tolist(), samples]
    return [Part(number, range(*ids)) for number, ids in enumerate(zip(begins.tolist(), ends, strict=True))]


@dataclass(frozen=True, kw_only=True)
class PartByPart:
    """The order of inference: the batches of some parts, one part after another.

    Args:
        samples: N, the size of the source.
        batch_size: samples of a batch; the last one of a part may be smaller.
        parts: those to do.
    """

    samples: int
    batch_size: int
    parts: Sequence[Part]

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the batches; `step` is the place of their part in `parts`."""
        for place, part in enumerate(self.parts):
            for index, first in enumerate(part.ids[:: self.batch_size]):
                ids = np.arange(first, min(first + self.batch_size, part.ids.stop))
                yield MicroBatch(place, index, first, ids, np.zeros_like(ids))
