"""Cuts the work of inference into parts: ranges of ids, each of which one worker does as a whole.

    ids       0 ......................................... N-1
    parts     |0      |1      |2      |3      |4      |5   |
    batches   |  |  | |  |  | |                               never across two parts

How a source is cut depends on its size and the batch size alone. A result is therefore the same on any number of
workers, to the last bit on equal devices, and a part that is done need not be done again after a failure.

The evaluation of a job, which sums over ranks at its end, runs part by part as well:

    worker    evaluate(batches of part 0): its calls of `sum`, `gather_bytes`, ... are recorded
    worker    evaluate(batches of part 1): recorded
    driver    evaluate(no batches): each call returns what it would if each part were a further rank

An evaluation communicates only at its end, since ranks get unequal numbers of batches, or none. So the driver may be
such a rank. Sums are added in the order of the parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.stream.stream import MicroBatch
from raydali.errors import UsageError
from raydali.training.worker import Worker

LEAST_PARTS, MOST_PARTS = 64, 4096
"""Enough for any number of workers to share; few enough for one file for each."""
USUAL_SAMPLES = 2048
"""Samples of a part of a large source: what is lost when a worker fails."""
Calls = list[Any]
"""The values that a part gave, call by call: a tensor on the CPU for a sum, else bytes or a JSON value."""


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
    batches_per_part = max(1, min(batches // LEAST_PARTS, max(USUAL_SAMPLES // batch_size, batches // MOST_PARTS)))
    begins = np.arange(0, samples, batches_per_part * batch_size)
    if edges is not None:
        begins = np.unique(edges[np.searchsorted(edges, begins)[begins <= edges[-1]]])
    ends = [*begins[1:].tolist(), samples]
    return [Part(number, range(*ids)) for number, ids in enumerate(zip(begins.tolist(), ends, strict=True))]


@dataclass(frozen=True, kw_only=True)
class PartByPart:
    """An order of the batches of some parts, one part after another.

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


class PartWorker(Worker):
    """The rank of a part, or the driver's, which has no batches.

    Args:
        device: of the rank.
        others: the calls of the parts that are further ranks for the driver.

    Attributes:
        calls: what this rank gave.
    """

    def __init__(self, device: torch.device, others: Sequence[Calls] = ()) -> None:
        super().__init__(rank=0, world_size=1, device=device, cpus=1, node="")
        if len({*map(len, others)}) > 1:
            raise UsageError(
                "the job's evaluate() calls worker.sum or the like more often for some samples than for others: call "
                "them at its end, equally often on each rank"
            )
        self.calls: Calls = []
        self._others = others

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Worker`."""
        return torch.stack(self._of_all(super().sum(tensor))).sum(0)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """See `Worker`."""
        return self._of_all(content)

    def exchange(self, value: object) -> list[Any]:
        """See `Worker`."""
        return self._of_all(value)

    def _of_all(self, value: Any) -> list[Any]:  # noqa: ANN401 (what the caller gives)
        """Record a value; return it, and those that the other parts gave in the same call."""
        self.calls.append(value)
        return [value, *(calls[len(self.calls) - 1] for calls in self._others)]
