"""The DALI loader: each rank has a DALI pipeline that reads and one that decodes, fed with inputs from Python."""

import gc
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import nvidia.dali as dali
import torch
from numpy.typing import NDArray
from nvidia.dali.pipeline import do_not_convert
from torch.utils.dlpack import from_dlpack

from raydali.data.loading import file_checks
from raydali.data.loading.dali_recovery import Keys, Once, Recovery, UndecodableError
from raydali.data.loading.first_batch import FirstBatch
from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.loading.prefetch import InputPrefetcher, InputsError, PreparedInputs
from raydali.data.loading.python_timing import timed_python
from raydali.data.sources.read_timing import Cause
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.dali_ops import conditionals_hint, external_inputs, reading_graph
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.host import cuda_queues

if TYPE_CHECKING:
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

PREFETCHED_BATCHES = 4
"""Batches in flight in DALI. Its stages together take longer than one step, so 2 would stall training."""
READ_BATCHES = 2
"""Batches whose files are read ahead of their decoding."""
READING_THREADS = 4
_DEFINING = threading.Lock()
"""Held to define a graph: meanwhile DALI's module has other functions (python_timing.py)."""


class DaliLoader(Loader):
    """Feeds `pipeline.inputs` of each micro-batch into the pipeline's graph, and hands its outputs to torch.

        micro-batches --> inputs (threads) --> read, shapes (DALI) --> crops (Python) --> decode, augment (DALI)
                          (prefetch.py)         READ_BATCHES                               PREFETCHED_BATCHES

    Pipelines without image files have no reading step. On a GPU the outputs are used on torch's current stream with no
    copy and no synchronization: DALI reuses their memory after the work queued on that stream is done.

    DALI's pipeline is unusable after an error. The loader then finds the broken samples of the batches in flight
    (dali_recovery.py), rebuilds the pipeline, and resumes in the same order with substitutes for them. It checks the
    files of the next batches before DALI reads them (file_checks.py), so that further broken files do not stall it.

    Args:
        prefetched: batches in flight in DALI.
        recovers: if False, raise `UndecodableError` where DALI fails on the contents of a batch.
    """

    def __init__(
        self,
        source: Source,
        pipeline: Pipeline[Any],
        order: Order,
        *,
        prefetched: int = PREFETCHED_BATCHES,
        recovers: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(source, pipeline, order, **options)
        self._recovers = recovers
        self._prefetched = prefetched
        self._dali_device: Device = "gpu" if self.device.type == "cuda" else "cpu"
        if self._dali_device == "gpu":
            cuda_queues.set_max_connections()
        self._prefetcher = InputPrefetcher(self.source, self.pipeline, self.quarantine, self.waits, self.python)
        trial = partial(_decodes, self.source, self.pipeline, LoaderOptions(device=self.device, threads=self.threads))
        self._recovery = Recovery(self.quarantine, trial if recovers else None)
        self._being_read: deque[PreparedInputs] = deque()
        self._under_way: deque[MicroBatch] = deque()
        self._reader: dali.Pipeline | None = None
        self._dali: dali.Pipeline | None = None
        self._batch_size = 0
        self._in_python = 0.0
        self._at_last_run = 0.0, 0.0  # `_in_python` and the time
        self._ahead: FirstBatch | None = None

    def begin_ahead(self) -> None:
        """Begin the next iteration in the background. If this fails, it begins again once it is asked for."""
        self._end_iteration()
        self._assign()
        self._ahead = FirstBatch(self._load(self.assigned), self.device)

    def __iter__(self) -> Iterator[Batch]:
        first = self._ahead.wait() if self._ahead is not None else None
        if self._ahead is None or first is None:
            return super().__iter__()
        self._consumed, self._batches, self._ahead = None, self._ahead.batches, None
        return self._hand_out(chain([first], self._batches), self.assigned)

    def wait_until_begun(self) -> None:
        """Wait until the first batch of `begin_ahead` is there, if it was called."""
        if self._ahead is not None:
            self._ahead.wait()

    def _end_iteration(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead.batches.close()
            self._ahead = None
        super()._end_iteration()

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        if self._dali is not None:
            self._drain(self._dali)
        first = next(micro_batches, None)
        if first is None:
            return
        self._batch_size = max(self._batch_size, len(first.ids))  # no micro-batch of an order is larger than its first
        self._prefetcher.begin(chain([first], micro_batches))
        while True:
            try:
                if self._dali is None:
                    self._build()
                assert self._dali is not None
                with self.waits.by(self._split_wait):
                    on_gpu = self._dali_device == "gpu"
                    outputs = self._dali.run(torch.cuda.current_stream(self.device) if on_gpu else None)
            except StopIteration:
                return
            except InputsError as failed:
                self._discard()
                raise failed.error from failed.error.__cause__
            except RuntimeError as error:
                with self.waits.on("storage"):
                    in_flight = [*self._under_way, *(prepared.micro_batch for prepared in self._being_read)]
                    self._recovery.find_cause(error, in_flight)
                    self._discard()
                    self._prefetcher.requeue(in_flight)
                continue
            self._recovery.end()
            named = zip(self.pipeline.outputs, outputs, strict=True)
            yield Batch({name: self._to_torch(output) for name, output in named}, self._under_way.popleft())

    def _discard(self) -> None:
        self._dali = None
        self._under_way.clear()
        self._discard_reader()

    def _discard_reader(self) -> None:
        self._reader = None
        self._being_read.clear()
        # DALI's graph is a reference cycle that keeps the last batch, and through it DALI's threads, alive. A loader
        # that does not recover was created just now: collecting the young generations suffices and is much faster.
        gc.collect(2 if self._recovers else 1)

    # The causes of waiting.

    def _split_wait(self, seconds: float) -> dict[Cause, float]:
        (in_python, at), self._at_last_run = self._at_last_run, (self._in_python, time.perf_counter())
        python = min(1.0, (self._in_python - in_python) / (self._at_last_run[1] - at))
        decode: Cause = "gpu decode" if self._dali_device == "gpu" else "cpu decode"
        return {"python": python * seconds, decode: (1 - python) * seconds}

    @property
    def prepared_batches(self) -> int:
        """Batches whose inputs are ready for DALI, which does not report how many finished batches it holds."""
        return self._prefetcher.ready

    # DALI's pipelines.

    def _build(self) -> None:
        """Build DALI's pipelines, for batches like the next one.

        Raises:
            StopIteration: there is no next batch.
        """
        prepared = self._prefetcher.peek()
        files, feed, num_inputs = self.pipeline.image_files, self._next_inputs, len(prepared.inputs)
        if files:
            self._reader = self._built_reader()
            shapes = [np.ones((len(prepared.micro_batch.ids), 2), np.int64)] * files
            crops = self._crops(prepared.micro_batch, shapes, prepared.inputs)
            feed, num_inputs = self._next_read, files + len(crops)
        nodes = do_not_convert(
            partial(external_inputs, feed, num_inputs, gpu_inputs=self.pipeline.gpu_inputs, device=self.device)
        )

        def graph() -> tuple[Any, ...]:
            return self.pipeline.graph(self.source, *nodes(), device=self._dali_device)

        define = dali.pipeline_def(graph, enable_conditionals=self.pipeline.conditionals)
        with _DEFINING, timed_python(self._add_python, self.python), conditionals_hint():
            self._dali = define(
                batch_size=self._batch_size,
                num_threads=self.threads,
                device_id=(self.device.index or 0) if self._dali_device == "gpu" else None,
                prefetch_queue_depth=self._prefetched,
            )
        self._dali.build()

    def _built_reader(self) -> dali.Pipeline:
        reader = dali.Pipeline(
            batch_size=self._batch_size,
            num_threads=min(READING_THREADS, self.threads),
            device_id=None,
            prefetch_queue_depth=READ_BATCHES,
        )
        with reader:
            files = self.pipeline.image_files
            reader.set_outputs(*reading_graph(self._next_files, files, reads=self.source.dali_reads))
        reader.build()
        return reader

    def _add_python(self, seconds: float) -> None:
        self._in_python += seconds

    # Callbacks that DALI calls to prefetch; StopIteration ends DALI's epoch.

    def _next_inputs(self) -> Inputs:
        prepared = self._prefetcher.take()
        self._under_way.append(prepared.micro_batch)
        return prepared.inputs

    def _next_files(self) -> Inputs:
        prepared = self._prefetcher.take()
        self._being_read.append(prepared)
        return prepared.inputs[: self.pipeline.image_files]

    def _next_read(self) -> tuple[Any, ...]:
        """Return the next batch from the reader, with its crops.

        If one of its files is broken, a new reader reads the batches again, with substitutes.
        """
        while True:
            assert self._reader is not None
            try:
                with self.waits.on("storage"):
                    read = self._reader.run()
            except RuntimeError:
                if not self._recovery.find_broken([prepared.micro_batch for prepared in self._being_read]):
                    raise  # `find_cause` finds the file that only DALI cannot read
            else:
                micro_batch, inputs, _ = self._being_read[0]
                files = self.pipeline.image_files
                shapes = [peeked.as_array()[:, :2] for peeked in read[files : 2 * files]]
                suspects = file_checks.suspects_among(read, files) | self.pipeline.unfit(shapes, inputs[files:])
                if not self._prefetcher.examine_suspects(micro_batch, suspects):
                    break
            self._prefetcher.requeue([prepared.micro_batch for prepared in self._being_read])
            self._discard_reader()
            self._reader = self._built_reader()
        self._being_read.popleft()
        self._under_way.append(micro_batch)
        with self.waits.on("python"):
            return (*read[:files], *self._crops(micro_batch, shapes, inputs))

    def _crops(self, micro_batch: MicroBatch, shapes: list[NDArray[np.int64]], inputs: Inputs) -> Inputs:
        pipeline = self.pipeline.in_epoch(micro_batch.counts_to)
        return pipeline.compute_crops(shapes, inputs[self.pipeline.image_files :], self._dali_device)

    def _drain(self, pipeline: dali.Pipeline) -> None:
        """Discard what was prefetched for the last order, and make the pipelines ready for the next."""
        self._prefetcher.stop()
        try:
            while True:
                pipeline.run()
        except StopIteration:
            self._under_way.clear()
            pipeline.reset()
            if self._reader is not None:
                self._reader.reset()
        except Exception:  # the failed batch is discarded anyway; if it is needed later, it fails again
            self._discard()

    def _to_torch(self, output: "TensorListCPU | TensorListGPU") -> torch.Tensor:
        tensor = from_dlpack(output.as_tensor())
        layout = output.layout()
        return self._to_device(tensor.movedim(layout.index("C") + 1, 1) if layout.endswith("HWC") else tensor)

    def close(self) -> None:
        """Stop DALI's threads and free its memory."""
        super().close()
        self._recovery.end()
        self._discard()
        self._prefetcher.close()


def _decodes(source: Source, pipeline: Pipeline[Any], options: LoaderOptions, keys: Keys) -> bool:
    """Return whether DALI decodes these samples as one batch."""
    with DaliLoader(source, pipeline, Once(keys), prefetched=1, recovers=False, **options) as loader:
        try:
            list(loader)
        except UndecodableError:
            return False
    return True
