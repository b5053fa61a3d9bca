"""The DALI loader: one DALI pipeline a rank, fed with ids by us, reading and decoding in C++ and on the GPU."""

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import numpy as np
import nvidia.dali as dali
import torch
from nvidia.dali import fn
from torch.utils.dlpack import from_dlpack

from raydali.data import hardware_queues
from raydali.data.loader import Batch, Loader
from raydali.data.pipeline import Device, Inputs
from raydali.data.stream import MicroBatch
from raydali.errors import DataError

PREFETCHED_BATCHES = 4
"""In DALI's hands at once. It is a row of stages that take longer together than a step does: with 2 a step waits."""
PREPARED_BATCHES = 4
"""Whose inputs are made ahead of DALI's asking, all at once: what counts where inputs are read from object stores."""
READ_BATCHES = 2
"""Read ahead of their decoding."""
READING_THREADS = 4

Prepared = tuple[MicroBatch, Inputs]


class DaliLoader(Loader):
    """Feeds `pipeline.inputs` of each micro-batch into the pipeline's graph, and hands its outputs to torch.

        micro-batches --> inputs (threads) --> read, shapes (DALI) --> place --> decode, augment (DALI) --> tensors
                          PREPARED_BATCHES     READ_BATCHES                      PREFETCHED_BATCHES

    On a GPU the outputs are bound to torch's current stream without a copy and without waiting for it: DALI's memory
    is free again when the work queued on that stream is done.

    Args:
        prefetched: batches in DALI's hands at once.
    """

    def __init__(self, *args: Any, prefetched: int = PREFETCHED_BATCHES, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prefetched = prefetched
        self._where: Device = "gpu" if self.device.type == "cuda" else "cpu"
        if self._where == "gpu":
            hardware_queues.widen()
        self._threads = ThreadPoolExecutor(PREPARED_BATCHES)
        self._prepared: Iterator[Prepared] = iter(())
        self._pending: deque[tuple[MicroBatch, Future[Inputs]]] = deque()
        self._being_read: deque[Prepared] = deque()
        self._under_way: deque[MicroBatch] = deque()
        # DALI takes what it is fed without copying it, and may still be at a batch that it has handed out.
        self._fed: deque[Any] = deque(maxlen=2 * prefetched + 2)
        self._reader: dali.Pipeline | None = None
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
            self._build(*first)
        assert self._dali is not None
        while True:
            try:
                outputs = self._dali.run(torch.cuda.current_stream(self.device) if self._where == "gpu" else None)
            except StopIteration:
                return
            except RuntimeError as error:
                raise self._explained(error) from error
            named = zip(self.pipeline.outputs, outputs, strict=True)
            yield Batch({name: self._to_torch(output) for name, output in named}, self._under_way.popleft())

    def _prepare(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Prepared]:
        def submit(micro_batch: MicroBatch) -> tuple[MicroBatch, Future[Inputs]]:
            ids, epochs = micro_batch.ids, micro_batch.epochs
            return micro_batch, self._threads.submit(self.pipeline.inputs, self.source, ids, epochs)

        submitted = map(submit, micro_batches)
        pending = self._pending = deque(islice(submitted, PREPARED_BATCHES))
        while pending:
            micro_batch, inputs = pending.popleft()
            pending.extend(islice(submitted, 1))
            try:
                yield micro_batch, inputs.result()
            except OSError as error:  # it names the file
                raise DataError(str(error)) from error

    @property
    def prepared_batches(self) -> int:
        """Those whose inputs lie ready for DALI, PREPARED_BATCHES at most; what DALI has done of its own, it hides."""
        return sum(inputs.done() for _, inputs in tuple(self._pending))

    def _build(self, micro_batch: MicroBatch, inputs: Inputs) -> None:
        """Build DALI's pipelines, for batches like this one: none of an order is larger than its first."""
        batch_size, files, feed = len(micro_batch.ids), self.pipeline.image_files, self._next_inputs
        fed = len(inputs)
        if files:
            self._reader = dali.Pipeline(
                batch_size=batch_size,
                num_threads=min(READING_THREADS, self.threads),
                device_id=None,
                prefetch_queue_depth=READ_BATCHES,
            )
            with self._reader:
                nodes = fn.external_source(self._next_files, num_outputs=files, batch=True)
                contents = [fn.io.file.read(node) if self.source.dali_reads else node for node in nodes]
                self._reader.set_outputs(*contents, *map(fn.peek_image_shape, contents))
            self._reader.build()
            shapes = [np.ones((batch_size, 2), np.int64)] * files
            feed, fed = self._next_read, files + len(self.pipeline.place(shapes, inputs[files:], self._where))
        self._dali = dali.Pipeline(
            batch_size=batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if self._where == "gpu" else None,
            prefetch_queue_depth=self._prefetched,
        )
        with self._dali:
            nodes = self._external_sources(feed, fed)
            self._dali.set_outputs(*self.pipeline.graph(self.source, *nodes, device=self._where))
        self._dali.build()

    def _external_sources(self, feed: Callable[[], tuple[Any, ...]], fed: int) -> list[Any]:
        """Nodes of what `feed` returns, a batch at a time: the first `gpu_inputs` lie on the GPU."""
        if not (resident := self.pipeline.gpu_inputs):
            return list(fn.external_source(feed, num_outputs=fed, batch=True, no_copy=True))
        parts: tuple[deque[Any], deque[Any]] = deque(), deque()

        def of(side: int) -> tuple[Any, ...]:
            if not parts[side]:
                whole = feed()
                parts[0].append(whole[:resident])
                parts[1].append(whole[resident:])
            part: tuple[Any, ...] = parts[side].popleft()
            return part

        # On a stream of its own: on torch's, DALI's copies would wait for the steps that are queued there.
        stream = torch.cuda.Stream(self.device).cuda_stream
        on_gpu = fn.external_source(lambda: of(0), num_outputs=resident, batch=True, device="gpu", cuda_stream=stream)
        return [*on_gpu, *fn.external_source(lambda: of(1), num_outputs=fed - resident, batch=True, no_copy=True)]

    # What DALI asks for ahead of time; StopIteration ends its epoch.

    def _next_inputs(self) -> Inputs:
        micro_batch, inputs = next(self._prepared)
        self._under_way.append(micro_batch)
        self._fed.append(inputs)
        return inputs

    def _next_files(self) -> Inputs:
        prepared = next(self._prepared)
        self._being_read.append(prepared)
        return prepared[1][: self.pipeline.image_files]

    def _next_read(self) -> tuple[Any, ...]:
        assert self._reader is not None
        read = self._reader.run()
        files = len(read) // 2
        micro_batch, inputs = self._being_read.popleft()
        self._under_way.append(micro_batch)
        shapes = [peeked.as_array()[:, :2] for peeked in read[files:]]
        fed = (*read[:files], *self.pipeline.place(shapes, inputs[files:], self._where))
        self._fed.append(fed)
        return fed

    def _drain(self, pipeline: dali.Pipeline) -> None:
        """Throw away what was prefetched for the last order, and make the pipelines ready for the next."""
        self._prepared = iter(())
        try:
            while True:
                pipeline.run()
        except StopIteration:
            self._under_way.clear()
            pipeline.reset()
            if self._reader is not None:
                self._reader.reset()

    def _explained(self, error: RuntimeError) -> Exception:
        """DALI does not say which file it stumbled over: the first under way that cannot be read otherwise either."""
        for micro_batch in [*self._under_way, *(micro_batch for micro_batch, _ in self._being_read)]:
            for id, epoch in zip(micro_batch.ids.tolist(), micro_batch.epochs.tolist(), strict=True):
                try:
                    self.pipeline.sample(self.source, id, epoch)
                except Exception as reason:
                    return DataError(f"sample {id} cannot be read: {self.source.path(id)}: {reason}")
        return error

    def _to_torch(self, output: Any) -> torch.Tensor:
        tensor = from_dlpack(output.as_tensor())
        layout = output.layout()
        return self._to_device(tensor.movedim(layout.index("C") + 1, 1) if layout.endswith("HWC") else tensor)

    def close(self) -> None:
        """Stop DALI's threads and free its memory."""
        super().close()
        self._dali = self._reader = None
        self._being_read.clear()
        self._fed.clear()
        gc.collect()  # DALI's graph, a ring of objects, holds the last batch that it was fed, and so its threads
        self._threads.shutdown(cancel_futures=True)
