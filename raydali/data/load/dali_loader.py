"""A loader that decodes and augments in DALI, in C++ and on the GPU.

    micro-batches --> prepared on threads -------------> fed on a thread --> decode, augment (DALI) --> torch
                      files, windows (preparation.py)                        depths.DECODED ahead

To feed a batch takes a millisecond of Python, in which the training thread would launch no kernel.
DALI's pipeline is unusable after an error. The loader then finds the files that DALI refuses among the batches in
flight, rebuilds the pipeline, and resumes in the same order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

import nvidia.dali as dali
import torch
from nvidia.dali.pipeline import do_not_convert
from torch.utils.dlpack import from_dlpack

from raydali.data.broken.screening import Keys, Screening, failing
from raydali.data.decode.dali_trial import cause_of
from raydali.data.index.source import Source
from raydali.data.load import depths
from raydali.data.load.loader import Batch, Loader, LoaderOptions
from raydali.data.load.preparation import Preparation, Prepared
from raydali.data.read.reading import Backoff, Cause, WaitTimer, shares
from raydali.data.stream.stream import MicroBatch, Once, Order
from raydali.data.tasks.dali_ops import conditionals_hint, external_inputs, shut_down
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.errors import StorageAway
from raydali.host import hardware

if TYPE_CHECKING:
    from nvidia.dali.tensors import TensorListCPU, TensorListGPU

READ_OPERATOR = "`nvidia.dali.fn.io.file.read`"
"""The operator that reads files, as DALI's errors name it. Its failure in a graph is no sign of broken contents."""
ALIGNMENT = 16
"""Bytes: torch.compile copies inputs that are aligned to less."""


class DaliLoader(Loader):
    """Feeds prepared batches into the graph of the pipeline, and hands its outputs to torch.

    On a GPU the outputs are used on torch's current stream with no copy and no synchronization: DALI reuses their
    memory after the work queued on that stream is done.

    Args:
        prefetched: batches in flight in DALI.
        together: micro-batches that DALI decodes as one batch. Default: see `depths.together`.
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
        prefetched: int = depths.DECODED,
        together: int | None = None,
        recovers: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(source, pipeline, order, **options)
        self._prefetched, self._together, self._recovers = prefetched, together, recovers
        self._backoff = Backoff(self.quarantine.storage)
        self._dali_device: Device = "gpu" if self.device.type == "cuda" else "cpu"
        self._decodes: Cause = "gpu decode" if self._dali_device == "gpu" else "cpu decode"
        if self._dali_device == "gpu":
            hardware.set_max_connections()
        self._gpu = (self.device.index or 0) if self._dali_device == "gpu" else None
        self._screening = Screening(self.quarantine, self._gpu, self.threads)
        self._preparation = Preparation(self, self._screening, self._dali_device)
        self._in_flight = deque[Prepared]()
        self._next: Prepared | None = None
        self._error: Exception | None = None
        self._dali: dali.Pipeline | None = None
        self._batch_size = 0
        self._at_last_run = 0.0, 0.0  # seconds of Python in graphs, and the time
        self._ahead: FirstBatch | None = None
        self._is_ahead = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feeding")
        self._feeding = WaitTimer()  # of the last batch that was fed
        self._fed: Future[None] | None = None
        self.on_close: Callable[[], object] | None = None

    def begin_ahead(self) -> None:
        """Begin the next iteration in the background. If this fails, it begins again once it is asked for."""
        self._end_iteration()
        self._is_ahead = True
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
        self._drain()
        first = next(micro_batches, None)
        if first is None:
            return
        if self._together is None:
            decodes_on_gpu = self._dali_device == "gpu" and self.pipeline.image_files
            self._together = depths.together(len(first.ids)) if decodes_on_gpu else 1
        # No micro-batch of an order is larger than its first one.
        self._batch_size = max(self._batch_size, len(first.ids) * self._together)
        self._preparation.begin(chain([first], micro_batches), self._together)
        while True:
            if self._dali is None and not self._build():
                break
            assert self._dali is not None
            try:
                outputs = self._run(self._dali)
            except StopIteration:
                break
            except RuntimeError as error:
                self._go_on_after(error)
                continue
            self._backoff.end()
            named, micro_batch = zip(self.pipeline.outputs, outputs, strict=True), self._in_flight.popleft().micro_batch
            tensors = {name: self._to_torch(output) for name, output in named}
            if self._is_ahead:  # DALI reuses memory in the order of that thread's stream, but another one will use it
                tensors, self._is_ahead = {name: tensor.clone() for name, tensor in tensors.items()}, False
            self._fed = self._thread.submit(self._feed_ahead, self._dali)
            yield from _parts(tensors, micro_batch)
        if self._error is not None:
            self._discard()
            raise self._error

    def _run(self, pipeline: dali.Pipeline) -> tuple[Any, ...]:
        """Return the outputs of the next batch."""
        fed = self._fed or self._thread.submit(self._feed_ahead, pipeline)
        with self.waits.by(self._split_feeding):
            fed.result()
        with self.waits.by(self._split_wait):
            on_gpu = self._dali_device == "gpu"
            outputs: tuple[Any, ...] = pipeline.outputs(torch.cuda.current_stream(self.device) if on_gpu else None)
        return outputs

    def _feed_ahead(self, pipeline: dali.Pipeline) -> None:
        self._feeding = WaitTimer()
        with self._feeding.on(self._decodes):
            pipeline.schedule_run()

    def _wait_until_fed(self) -> None:
        if self._fed is not None:
            self._fed.exception()
            self._fed = None

    def _go_on_after(self, error: RuntimeError) -> None:
        """Load the batches in flight again after an error of DALI, without the samples on which it fails.

        Raises:
            StorageAway: a graph of one's own could read no file for a minute.
            RuntimeError: the error itself, if no sample is its cause.
        """
        batches = [*self._in_flight]
        if not (batches and self._recovers):
            raise error
        with self.waits.on(self._decodes):
            keys = [key for batch in batches for key in batch.micro_batch.keys]
            refused = self._screening.find_refused([batch.read for batch in batches if batch.read is not None])
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
        self._discard()
        self._preparation.again([batch.micro_batch for batch in batches])

    def _loads(self, keys: Keys) -> bool:
        """Return whether DALI loads these samples as one batch."""
        options = LoaderOptions(device=self.device, threads=self.threads)
        with DaliLoader(self.source, self.pipeline, Once(keys), prefetched=1, recovers=False, **options) as loader:
            try:
                list(loader)
            except RuntimeError:
                return False
        return True

    def _discard(self) -> None:
        """End DALI's pipeline, and forget the batches in flight."""
        self._wait_until_fed()
        if self._dali is not None:
            shut_down(self._dali)
        self._dali = self._next = None
        self._in_flight.clear()

    def _split_feeding(self, seconds: float) -> dict[Cause, float]:
        return shares(seconds, self._feeding.seconds)

    def _split_wait(self, seconds: float) -> dict[Cause, float]:
        (in_python, at), self._at_last_run = self._at_last_run, (self.python.in_graphs, time.perf_counter())
        python = min(1.0, (self._at_last_run[0] - in_python) / (self._at_last_run[1] - at))
        return {"python": python * seconds, self._decodes: (1 - python) * seconds}

    @property
    def prepared_batches(self) -> int:
        """Batches whose inputs are ready for DALI, which does not report how many finished batches it holds."""
        return self._preparation.ready

    def _build(self) -> bool:
        """Build DALI's pipeline for batches like the next one; return False if there is none."""
        self._feeding = WaitTimer()
        with self.waits.by(self._split_feeding):
            self._next = self._take()
        if self._next is None:
            return False
        number, on_gpu = len(self._next.inputs), self.pipeline.gpu_inputs
        nodes = do_not_convert(partial(external_inputs, self._feed, number, gpu_inputs=on_gpu, device=self.device))

        def graph() -> tuple[Any, ...]:
            return self.pipeline.graph(self.source, *nodes(), device=self._dali_device)

        define = dali.pipeline_def(graph, enable_conditionals=self.pipeline.conditionals)
        with conditionals_hint():
            self._dali = define(
                batch_size=self._batch_size,
                num_threads=self.threads,
                device_id=self._gpu,
                prefetch_queue_depth=min(self._prefetched, max(2, self._prefetched // (self._together or 1))),
            )
        self._dali.build()
        return True

    def _take(self) -> Prepared | None:
        """Return the next batch; None at the end, or after an error, which is raised after the batches before it."""
        if self._error is not None:
            return None
        try:
            return self._preparation.take(self._feeding)
        except Exception as error:
            self._error = error
            return None

    def _feed(self) -> Inputs:
        """Return the inputs of the next batch for DALI, which ends its epoch after a StopIteration."""
        prepared, self._next = self._next or self._take(), None
        if prepared is None:
            raise StopIteration
        self._in_flight.append(prepared)
        return prepared.inputs

    def _drain(self) -> None:
        """Discard what was prefetched for the last order, and make DALI's pipeline ready for the next."""
        self._wait_until_fed()
        self._preparation.begin(iter(()))
        self._next = self._error = None
        if self._dali is None:
            return
        try:
            while True:
                self._dali.schedule_run()
                self._dali.outputs()
        except StopIteration:
            self._in_flight.clear()
            self._dali.reset()
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
        self._preparation.close()
        self._discard()
        self._thread.shutdown()
        self._screening.close()
        if self.on_close is not None:
            self.on_close()


def _parts(tensors: dict[str, torch.Tensor], micro_batch: MicroBatch) -> Iterator[Batch]:
    """The batches of the micro-batches that were joined in one; one of which all samples are left out has none."""
    end = 0
    for part in micro_batch.parts or (micro_batch,):
        begin, end = end, end + len(part.ids)
        if end > begin:
            yield Batch({name: _aligned(tensor[begin:end]) for name, tensor in tensors.items()}, part)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory begins where compiled code takes it fastest."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


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
            if stream is not None:
                stream.synchronize()
            self._batch = batch

    def wait(self) -> Batch | None:
        """Return the batch, for the current stream; None if there is none or after an error."""
        self._thread.join()
        if self._batch is not None and self._device.type == "cuda":
            # Micro-batches that were decoded together with it have the same memory.
            for tensor in self._batch.tensors.values():
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._batch
