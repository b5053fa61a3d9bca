"""Makes a loader by its name, and defines `synthetic`: one resident batch repeated, the ceiling of all loaders."""

from collections.abc import Generator, Iterator
from typing import Any, Literal, Unpack

import torch

from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.pipeline import Pipeline
from raydali.extras import require_dali

LoaderName = Literal["dali", "torch", "resident", "synthetic"]


class SyntheticLoader(Loader):
    """Hands out one resident batch of noise for every micro-batch."""

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        resident: dict[str, torch.Tensor] = {}
        made_by: Pipeline[Any] | None = None
        for micro_batch in micro_batches:
            size, pipeline = len(micro_batch.ids), self.pipeline.in_epoch(micro_batch.counts_to)
            if pipeline != made_by:
                resident, made_by = self.resident_batch(size, micro_batch.counts_to), pipeline
            yield Batch({name: tensor[:size] for name, tensor in resident.items()}, micro_batch)


def make_loader(
    name: LoaderName, source: Source, pipeline: Pipeline[Any], order: Order, **options: Unpack[LoaderOptions]
) -> Loader:
    """Make the loader of that name; the other arguments are those of `Loader`."""
    if name == "synthetic":
        return SyntheticLoader(source, pipeline, order, **options)
    if name == "torch":
        from raydali.data.loading.torch_loader import TorchLoader

        return TorchLoader(source, pipeline, order, **options)
    if name == "resident":
        from raydali.data.loading.resident_loader import ResidentLoader

        return ResidentLoader(source, pipeline, order, **options)
    require_dali("the loader dali", "use the loader torch")
    from raydali.data.loading.dali_loader import DaliLoader

    return DaliLoader(source, pipeline, order, **options)
