"""The DALI loader: one DALI pipeline a rank, fed with ids by us, reading and decoding in C++ and on the GPU."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import nvidia.dali as dali
import torch
from nvidia.dali import fn
from torch.utils.dlpack import from_dlpack

from raydali.data import hardware_queues
from raydali.data.loader import Batch, Loader
from raydali.data.stream import MicroBatch
from raydali.errors import DataError

PREFETCHED_BATCHES = 4
"""In DALI's hands at once. It is a row of stages that take longer together than a step does: with 2 a step waits."""
PREPARED_BATCHES = 4
"""Whose inputs are made ahead of DALI's asking, all at once: what counts where inputs are read from object stores."""

Prepared = tuple[MicroBatch, tuple[Any, ...]]


class DaliLoader(Loader):
    """Feeds `pipeline.inputs` of each micro-batch into the pipeline's graph, and hands its outputs to torch.

        micro-batches --> inputs (threads) --> graph: read, decode, augment (DALI) --> tensors
                          PREPARED_BATCHES     PREFETCHED_BATCHES

    On a GPU the outputs are bound to torch's current stream without a copy and without waiting for it: DALI's memory
    is free again when the work queued on that stream is done.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.device.type == "cuda":
            hardware_queues.widen()
        self._threads = ThreadPoolExecutor(PREPARED_BATCHES)
        self._prepared: Iterator[Prepared] = iter(())
        self._under_way: deque[MicroBatch] = deque()
        self._dali: dali.Pipeline | None = None

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        if self._dali is not None:
            self._drain(self._dali)
        prepared = self._prepare(micro_batches)
        first = next(prepared, None)
        if first is None:
            return
        self._prepared = chain([first], prepared)
        if self._dali is None:
            micro_batch, inputs = first
            # None of an order is larger than its first.
            self._dali = self._build(batch_size=len(micro_batch.ids), inputs=len(inputs))
        on_gpu = self.device.type == "cuda"
        while True:
            try:
                outputs = self._dali.run(torch.cuda.current_stream(self.device) if on_gpu else None)
            except StopIteration:
                return
            except RuntimeError as error:
                raise self._explained(error) from error
            named = zip(self.pipeline.outputs, outputs, strict=True)
            yield Batch({name: self._to_torch(output) for name, output in named}, self._under_way.popleft())

    def _prepare(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Prepared]:
        def submit(micro_batch: MicroBatch) -> tuple[MicroBatch, Future[tuple[Any, ...]]]:
            ids, epochs = micro_batch.ids, micro_batch.epochs
            return micro_batch, self._threads.submit(self.pipeline.inputs, self.source, ids, epochs)

        submitted = map(submit, micro_batches)
        pending = deque(islice(submitted, PREPARED_BATCHES))
        while pending:
            micro_batch, inputs = pending.popleft()
            pending.extend(islice(submitted, 1))
            try:
                yield micro_batch, inputs.result()
            except OSError as error:  # it names the file
                raise DataError(str(error)) from error

    def _build(self, *, batch_size: int, inputs: int) -> dali.Pipeline:
        on_gpu = self.device.type == "cuda"
        pipeline = dali.Pipeline(
            batch_size=batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if on_gpu else None,
            prefetch_queue_depth=PREFETCHED_BATCHES,
        )
        with pipeline:
            nodes = fn.external_source(self._next_inputs, num_outputs=inputs, batch=True)
            pipeline.set_outputs(*self.pipeline.graph(self.source, *nodes, device="gpu" if on_gpu else "cpu"))
        pipeline.build()
        return pipeline

    def _next_inputs(self) -> tuple[Any, ...]:
        """What DALI asks for ahead of time; StopIteration ends its epoch."""
        micro_batch, inputs = next(self._prepared)
        self._under_way.append(micro_batch)
        return inputs

    def _drain(self, pipeline: dali.Pipeline) -> None:
        """Throw away what was prefetched for the last order, and make the pipeline ready for the next."""
        self._prepared = iter(())
        try:
            while True:
                pipeline.run()
        except StopIteration:
            self._under_way.clear()
            pipeline.reset()

    def _explained(self, error: RuntimeError) -> Exception:
        """DALI does not say which file it stumbled over: the first under way that cannot be read otherwise either."""
        for micro_batch in self._under_way:
            for id, epoch in zip(micro_batch.ids.tolist(), micro_batch.epochs.tolist(), strict=True):
                try:
                    self.pipeline.sample(self.source, id, epoch)
                except Exception as reason:
                    return DataError(f"sample {id} cannot be read: {self.source.path(id)}: {reason}")
        return error

    def _to_torch(self, output: Any) -> torch.Tensor:
        tensor = from_dlpack(output.as_tensor())
        return self._to_device(tensor.permute(0, 3, 1, 2) if output.layout() == "HWC" else tensor)

    def close(self) -> None:
        """Stop DALI's threads and free its memory."""
        super().close()
        self._dali = None
        self._threads.shutdown(cancel_futures=True)
