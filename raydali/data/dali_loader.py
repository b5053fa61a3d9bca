"""The DALI loader: one DALI pipeline a rank, fed with ids by us, reading and decoding in C++ and on the GPU."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import nvidia.dali as dali
import torch
from nvidia.dali import fn

from raydali.data.loader import Batch, Loader
from raydali.data.stream import MicroBatch

PREFETCHED_BATCHES = 2


class DaliLoader(Loader):
    """Feeds `pipeline.inputs` of each micro-batch into the pipeline's graph, and hands its outputs to torch.

    No bytes of a file pass through Python: the graph gets paths and random numbers. On a GPU the outputs are bound
    to torch's current stream without a copy: DALI's memory is free again when the work queued on that stream is.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self._under_way: deque[MicroBatch] = deque()
        self._dali: dali.Pipeline | None = None

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Batch]:
        if self._dali is None:
            # Sized by the first micro-batch: none of an order is larger.
            first = next(micro_batches, None)
            if first is None:
                return
            self._micro_batches = _chain(first, micro_batches)
            self._dali = self._build(len(first.ids))
        else:
            self._drain(self._dali)
            self._micro_batches = micro_batches
        on_gpu = self.device.type == "cuda"
        while True:
            stream = torch.cuda.current_stream(self.device) if on_gpu else None
            try:
                outputs = self._dali.run(stream)
            except StopIteration:
                return
            tensors = {
                name: self._to_torch(output) for name, output in zip(self.pipeline.outputs, outputs, strict=True)
            }
            yield Batch(tensors, self._under_way.popleft())

    def _build(self, batch_size: int) -> dali.Pipeline:
        on_gpu = self.device.type == "cuda"
        pipeline = dali.Pipeline(
            batch_size=batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if on_gpu else None,
            prefetch_queue_depth=PREFETCHED_BATCHES,
        )
        with pipeline:
            first = self.order.micro_batches(self.rank, self.world_size, start=self.start)
            example = next(first)
            count = len(self.pipeline.inputs(self.source, example.ids, example.epochs))
            inputs = fn.external_source(self._next_inputs, num_outputs=count, batch=True)
            pipeline.set_outputs(*self.pipeline.graph(*inputs, device="gpu" if on_gpu else "cpu"))
        pipeline.build()
        return pipeline

    def _next_inputs(self) -> tuple[Any, ...]:
        """What DALI asks for ahead of time; StopIteration ends its epoch."""
        micro_batch = next(self._micro_batches)
        self._under_way.append(micro_batch)
        return tuple(self.pipeline.inputs(self.source, micro_batch.ids, micro_batch.epochs))

    def _drain(self, pipeline: dali.Pipeline) -> None:
        """Throw away what was prefetched for the last order, and make the pipeline ready for the next."""
        self._micro_batches = iter(())
        try:
            while True:
                pipeline.run()
        except StopIteration:
            self._under_way.clear()
            pipeline.reset()

    def _to_torch(self, output: Any) -> torch.Tensor:
        batch = output.as_tensor()
        tensor = torch.from_dlpack(batch)
        if batch.layout() == "HWC" or output.layout() == "HWC":
            tensor = tensor.permute(0, 3, 1, 2)
        return self._to_device(tensor)

    def close(self) -> None:
        """Stop DALI's threads and free its memory."""
        if self._dali is not None:
            self._drain(self._dali)
            self._dali = None


def _chain(first: MicroBatch, rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    yield first
    yield from rest
