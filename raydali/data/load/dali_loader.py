"""The DALI loader: each rank has a DALI pipeline that reads and one that decodes, fed with inputs from Python."""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import nvidia.dali as dali
import torch
from numpy.typing import NDArray
from nvidia.dali.pipeline import do_not_convert
from torch.utils.dlpack import from_dlpack

from raydali.data.broken.screening import Keys, Read, Screening, failing
from raydali.data.decode.dali_trial import cause_of
from raydali.data.index.source import Source
from raydali.data.load.batch_reader import BatchReader, Contents, InputPrefetcher, InputsError, PreparedInputs
from raydali.data.load.loader import Batch, Loader, LoaderOptions
from raydali.data.read.reading import Backoff, Cause
from raydali.data.stream.stream import MicroBatch, Once, Order
from raydali.data.tasks.dali_ops import conditionals_hint, external_inputs, timed_python
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.errors import StorageAway
from raydali.host import hardware

if TYPE_CHECKING:
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

PREFETCHED_BATCHES = 4
"""Batches in flight in DALI. Its stages together take longer than one step, so 2 would stall training."""
READ_OPERATOR = "`nvidia.dali.fn.io.file.read`"
"""The operator that reads files, as DALI's errors name it. Its failure in a graph is no sign of broken contents."""
Shapes = list[NDArray[np.int64]]
_DEFINING = threading.Lock()
"""Held to define a graph: meanwhile DALI's module has other functions (`timed_python`)."""


class DaliLoader(Loader):
    """Feeds `pipeline.inputs` of each micro-batch into the pipeline's graph, and hands its outputs to torch.

        micro-batches --> inputs (threads) --> read (DALI) --> screen, crop (Python) --> decode, augment (DALI)
                          batch_reader.py                      screening.py              PREFETCHED_BATCHES

    Pipelines without image files have no reading step. On a GPU the outputs are used on torch's current stream with no
    copy and no synchronization: DALI reuses their memory after the work queued on that stream is done.

    What DALI does not decode as Pillow does, Pillow decodes (screening.py). DALI's pipeline is unusable after an error.
    The loader then finds the files that DALI refuses among the batches in flight, rebuilds the pipeline, and resumes in
    the same order.

    Args:
        prefetched: batches in flight in DALI.
        recovers: if False, raise DALI's error where DALI fails on a batch.

    Attributes:
        on_close: is called at the end of `close`.
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
        self._prefetched, self._recovers = prefetched, recovers
        self._backoff = Backoff(self.quarantine.storage)
        self._dali_device: Device = "gpu" if self.device.type == "cuda" else "cpu"
        self._decodes: Cause = "gpu decode" if self._dali_device == "gpu" else "cpu decode"
        if self._dali_device == "gpu":
            hardware.set_max_connections()
        self._gpu = (self.device.index or 0) if self._dali_device == "gpu" else None
        self._screening = Screening(self.quarantine, self._gpu, self.threads)
        self._prefetcher = InputPrefetcher(self, pipeline)
        self._reader = BatchReader(self, self._prefetcher)
        self._under_way: deque[tuple[MicroBatch, Read | None]] = deque()
        self._dali: dali.Pipeline | None = None
        self._in_python = 0.0
        self._at_last_run = 0.0, 0.0  # `_in_python` and the time
        self._ahead: FirstBatch | None = None
        self.on_close: Callable[[], object] | None = None

    def begin_ahead(self) -> None:
        """Begin the next iteration in the background. If this fails, it begins again once it is asked for."""
        self._end_iteration()
        self._ahead = FirstBatch(self._begin(), self.device)

    def __iter__(self) -> Iterator[Batch]:
        first = self._ahead.wait() if self._ahead is not None else None
        if self._ahead is None or first is None:
            return super().__iter__()
        self._consumed, self._batches, self._ahead = None, self._ahead.batches, None
        return self._hand_out(chain([first], self._batches))

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
        # No micro-batch of an order is larger than its first one.
        self._reader.batch_size = max(self._reader.batch_size, len(first.ids))
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
                self._go_on_after(error)
                continue
            self._backoff.end()
            named = zip(self.pipeline.outputs, outputs, strict=True)
            yield Batch({name: self._to_torch(output) for name, output in named}, self._under_way.popleft()[0])

    def _go_on_after(self, error: RuntimeError) -> None:
        """Load the batches in flight again after an error of DALI, without the samples on which it fails.

        Raises:
            StorageAway: a graph of one's own could read no file for a minute.
            RuntimeError: the error itself, if no sample is its cause.
        """
        batches = [*self._under_way]
        if not (batches and self._recovers):
            raise error
        with self.waits.on(self._decodes):
            keys = [key for batch, _ in batches for key in batch.keys]
            refused = self._screening.find_refused([read for _, read in batches if read is not None])
            if refused or self.quarantine.examine((id for id, _ in keys), again=True):
                pass
            elif READ_OPERATOR in str(error):
                if not self._backoff.pause(error):
                    raise StorageAway(f"DALI cannot read the data: {cause_of(error)}") from error
            elif blamed := failing(keys, self._loads):
                reason = f"Pillow can decode it, DALI's graph fails on it: {cause_of(error)}"
                for id in blamed:
                    self.quarantine.mark_broken(id, reason)
            else:
                raise error
        self._prefetcher.requeue([*(batch for batch, _ in batches), *self._discard()])

    def _loads(self, keys: Keys) -> bool:
        """Return whether DALI loads these samples as one batch."""
        options = LoaderOptions(device=self.device, threads=self.threads)
        with DaliLoader(self.source, self.pipeline, Once(keys), prefetched=1, recovers=False, **options) as loader:
            try:
                list(loader)
            except RuntimeError:
                return False
        return True

    def _discard(self) -> list[MicroBatch]:
        """End DALI's pipelines, and return the batches that were read ahead."""
        self._dali = None
        self._under_way.clear()
        ahead = self._reader.discard()
        # DALI's graph is a reference cycle that keeps the last batch, and through it DALI's threads, alive. A loader
        # that does not recover was created just now: collecting the young generations suffices and is much faster.
        gc.collect(2 if self._recovers else 1)
        return ahead

    # The causes of waiting.

    def _split_wait(self, seconds: float) -> dict[Cause, float]:
        (in_python, at), self._at_last_run = self._at_last_run, (self._in_python, time.perf_counter())
        python = min(1.0, (self._in_python - in_python) / (self._at_last_run[1] - at))
        return {"python": python * seconds, self._decodes: (1 - python) * seconds}

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
                batch_size=self._reader.batch_size,
                num_threads=self.threads,
                device_id=self._gpu,
                prefetch_queue_depth=self._prefetched,
            )
        self._dali.build()

    def _add_python(self, seconds: float) -> None:
        self._in_python += seconds

    # Callbacks that DALI calls to prefetch; StopIteration ends DALI's epoch.

    def _next_inputs(self) -> Inputs:
        prepared = self._prefetcher.take()
        self._under_way.append((prepared.micro_batch, None))
        return prepared.inputs

    def _next_read(self) -> tuple[Any, ...]:
        """Return the next batch from the reader, with its crops; broken samples are replaced first, or left out."""
        prepared, contents = self._reader.take()
        while (screened := self._screened(prepared, contents)) is None:
            prepared, contents = self._prefetcher.prepare(prepared.micro_batch), None
            if not len(prepared.micro_batch.ids):
                return self._next_read()
        read, shapes = screened
        self._under_way.append((prepared.micro_batch, read))
        with self.waits.on("python"):
            return (*read.for_dali, *self._crops(prepared.micro_batch, shapes, prepared.inputs))

    def _screened(self, prepared: PreparedInputs, contents: Contents | None) -> tuple[Read, Shapes] | None:
        """Return the files of a batch as DALI gets them, and their shapes; None if a sample is broken."""
        if contents is None:
            contents = self._reader.read_here(prepared)
        if contents is None:
            return None
        read = Read(prepared.micro_batch.read_ids, contents)
        shapes = self._screening.shapes(read)
        if shapes is None:
            return None
        unfit = self.pipeline.unfit(shapes, prepared.inputs[self.pipeline.image_files :])
        # Also if it was found sound before: its file has changed.
        is_broken = unfit.any() and self.quarantine.examine(read.ids[unfit], again=True)
        return None if is_broken else (read, shapes)

    def _crops(self, micro_batch: MicroBatch, shapes: Shapes, inputs: Inputs) -> Inputs:
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
        self._backoff.end()
        self._discard()
        self._prefetcher.close()
        self._screening.close()
        if self.on_close is not None:
            self.on_close()


class FirstBatch:
    """A thread that takes the first one of these batches before somebody asks for it, on a stream of its own.

    Attributes:
        batches: the others, once `wait` has returned the first one.
    """

    def __init__(self, batches: Generator[Batch, None, None], device: torch.device) -> None:
        self.batches, self._device = batches, device
        self._batch: Batch | None = None
        self._thread = threading.Thread(target=self._take, daemon=True, name="first batch")
        self._thread.start()

    def _take(self) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with suppress(Exception), torch.cuda.stream(stream):
            batch = next(self.batches)
            # The loader reuses memory in the order of this stream, but the batch will be used on another one.
            tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
            if stream is not None:
                stream.synchronize()
            self._batch = Batch(tensors, batch.micro_batch)

    def wait(self) -> Batch | None:
        """Return the batch, for the current stream; None if there is none or after an error."""
        self._thread.join()
        if self._batch is not None and self._device.type == "cuda":
            for tensor in self._batch.tensors.values():
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._batch
