"""Makes the inputs of micro-batches ahead of their decoding, and reads their image files.

micro-batches --InputPrefetcher--> inputs --BatchReader--> contents of files
threads                     a DALI pipeline, or threads where that has failed
"""

import gc
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali as dali
from numpy.typing import NDArray
from nvidia.dali import fn

from raydali.data.broken.quarantine import unreadable
from raydali.data.load.loader import Loader
from raydali.data.read import storage
from raydali.data.read.reading import Backoff, Cause, reading_seconds
from raydali.data.stream.stream import MicroBatch
from raydali.data.tasks.pipeline import Inputs, Pipeline

PREFETCHED_INPUTS = 4
"""Batches whose inputs are prefetched, concurrently to hide object-store latency."""
READ_BATCHES = 2
"""Batches whose files are read ahead of their decoding."""
READING_THREADS = 4

Contents = Sequence[Sequence[Any]]
"""For each image file of a sample, the contents of a batch: arrays, or a list of DALI."""


class PreparedInputs(NamedTuple):
    """A micro-batch ready for DALI.

    Attributes:
        micro_batch: with substitutes for samples known as broken; empty if all of them are left out.
        inputs: of the pipeline.
        version: of the quarantine when they were made; see `InputPrefetcher._version`.
    """

    micro_batch: MicroBatch
    inputs: Inputs
    version: int


class InputsError(Exception):
    """An error of `pipeline.inputs` that no sample causes. Its type keeps it apart from DALI's own errors.

    Attributes:
        error: the original one.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class InputPrefetcher:
    """Makes `pipeline.inputs` of micro-batches in threads, PREFETCHED_INPUTS ahead, and hands them out in order.

    Args:
        loader: whose source, quarantine and timers it uses.
        pipeline: makes the inputs.
    """

    def __init__(self, loader: Loader, pipeline: Pipeline[Any]) -> None:
        self._source, self._pipeline, self._quarantine = loader.source, pipeline, loader.quarantine
        self._waits = loader.waits
        self._running = loader.python.running if pipeline.inputs_are == "python" else nullcontext
        self._threads = ThreadPoolExecutor(PREFETCHED_INPUTS)
        self._prepared: Iterator[PreparedInputs] = iter(())
        self._pending: deque[tuple[MicroBatch, Future[PreparedInputs]]] = deque()
        self._failures = 0
        self._read_shares: dict[int, float] = {}

    def begin(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Prepare these micro-batches from now on."""
        self._prepared = self._prepare_ahead(micro_batches)

    def stop(self) -> None:
        """Prepare no more micro-batches."""
        self._prepared = iter(())

    def take(self) -> PreparedInputs:
        """Return the next one that is not empty, prepared again if one of its samples was found broken since.

        Raises:
            StopIteration: there is none.
            InputsError: there will be no more.
        """
        while True:
            prepared = next(self._prepared)
            if prepared.version != self._version:
                prepared = self.prepare(prepared.micro_batch)
            if len(prepared.micro_batch.ids):
                return prepared

    def peek(self) -> PreparedInputs:
        """Return what `take` returns next."""
        prepared = self.take()
        self._prepared = chain([prepared], self._prepared)
        return prepared

    def requeue(self, micro_batches: list[MicroBatch]) -> None:
        """Requeue these micro-batches first."""
        self._failures += 1
        self._prepared = chain(map(self.prepare, micro_batches), self._prepared)

    @property
    def ready(self) -> int:
        """The number of prepared micro-batches, PREFETCHED_INPUTS at most."""
        return sum(inputs.done() for _, inputs in tuple(self._pending))

    def close(self) -> None:
        """Stop the threads, without waiting for their current work."""
        self._threads.shutdown(cancel_futures=True)

    def _prepare_ahead(self, micro_batches: Iterator[MicroBatch]) -> Iterator[PreparedInputs]:
        submitted = ((batch, self._threads.submit(self.prepare, batch)) for batch in micro_batches)
        pending = self._pending = deque(islice(submitted, PREFETCHED_INPUTS))
        while pending:
            micro_batch, inputs = pending.popleft()
            pending.extend(islice(submitted, 1))
            with self._waits.by(partial(self._split_wait, micro_batch.number)):
                made = inputs.result()
            yield made

    def prepare(self, micro_batch: MicroBatch) -> PreparedInputs:
        """Return a micro-batch and its inputs, with substitutes for samples known as broken; it may be empty."""
        quarantine, backoff = self._quarantine, Backoff(self._quarantine.storage)
        try:
            while True:
                version = self._version
                settled = quarantine.with_substitutes(micro_batch) if quarantine.known else micro_batch
                if not len(settled.ids):
                    return PreparedInputs(settled, (), version)
                began, read = time.perf_counter(), reading_seconds()
                try:
                    with self._running():
                        pipeline = self._pipeline.in_epoch(settled.counts_to)
                        inputs = pipeline.inputs(self._source, settled.read_ids, settled.draw_keys)
                except MemoryError as error:
                    raise InputsError(error) from error
                except Exception as error:
                    is_file = isinstance(error, OSError)  # its message names the file
                    if quarantine.examine(settled.read_ids, again=True) or (is_file and backoff.pause(error)):
                        continue
                    raise (unreadable(str(error), error) if is_file else InputsError(error)) from error
                self._read_shares[micro_batch.number] = (reading_seconds() - read) / (time.perf_counter() - began)
                return PreparedInputs(settled, inputs, version)
        finally:
            backoff.end()

    @property
    def _version(self) -> int:
        """The version of what is known about broken samples: it grows."""
        return len(self._quarantine.known) + self._failures

    def _split_wait(self, number: int, seconds: float) -> dict[Cause, float]:
        read = self._read_shares.pop(number, 0.0)
        return {"storage": read * seconds, self._pipeline.inputs_are: (1 - read) * seconds}


class BatchReader:
    """Reads batches ahead. DALI's pipeline ends with an error if a file is missing: its batches are then read here.

    Inputs that are contents need no reading: DALI would copy them, for 20 ms of a core for 256 images of 131 KB.

    Args:
        loader: whose batches these are.
        prefetcher: makes their inputs.

    Attributes:
        batch_size: the largest number of samples of a batch.
    """

    def __init__(self, loader: Loader, prefetcher: InputPrefetcher) -> None:
        self._prefetcher, self._quarantine, self._waits = prefetcher, loader.quarantine, loader.waits
        self._files, self._threads = loader.pipeline.image_files, min(READING_THREADS, loader.threads)
        self._dali_reads = loader.source.dali_reads  # otherwise the inputs are contents, not paths
        self.batch_size = 0
        self._pipeline: dali.Pipeline | None = None
        self._being_read: deque[PreparedInputs] = deque()
        self._unread = 0  # batches being read whose pipeline failed

    def _built(self) -> dali.Pipeline:
        pipeline = dali.Pipeline(
            batch_size=self.batch_size, num_threads=self._threads, device_id=None, prefetch_queue_depth=READ_BATCHES
        )
        with pipeline:
            files = fn.external_source(self._next_files, num_outputs=self._files, batch=True, no_copy=True)
            pipeline.set_outputs(*(fn.io.file.read(column, dont_use_mmap=True) for column in files))
        pipeline.build()
        return pipeline

    def _next_files(self) -> Inputs:
        prepared = self._prefetcher.take()
        self._being_read.append(prepared)
        return prepared.inputs[: self._files]

    def take(self) -> tuple[PreparedInputs, Contents | None]:
        """Return the next batch and its contents, which are None if `read_here` has to return them.

        Raises:
            StopIteration: there is no further batch.
        """
        if not self._dali_reads:
            return self._prefetcher.take(), None
        if not self._unread:
            if self._pipeline is None:
                self._pipeline = self._built()
            try:
                with self._waits.on("storage"):
                    contents = self._pipeline.run()
                return self._being_read.popleft(), contents
            except RuntimeError:
                if not self._being_read:
                    raise
                self._unread = len(self._being_read)
                self._pipeline = None
            gc.collect()  # DALI's graph is a reference cycle that keeps its threads alive
        self._unread -= 1
        return self._being_read.popleft(), None

    def read_here(self, prepared: PreparedInputs) -> Contents | None:
        """Return the contents of a batch's files; None if a sample is broken, which the quarantine then knows.

        Raises:
            DataError, StorageAway: see Quarantine.
        """
        ids, files = prepared.micro_batch.read_ids, prepared.inputs[: self._files]
        if not self._dali_reads:
            return [[*column] for column in files]

        def content(id: int, path: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
            name = os.fsdecode(path.tobytes().rstrip(b"\0"))
            try:
                return np.frombuffer(self._quarantine.read(id, partial(storage.read, name)), np.uint8)
            except OSError:
                return None

        with self._waits.on("storage"), ThreadPoolExecutor(READING_THREADS) as threads:
            read = [[*threads.map(content, ids.tolist(), column)] for column in files]
            missing = np.array([[data is None or not len(data) for data in column] for column in read]).any(0)
            self._quarantine.examine(ids[missing], again=True)
        return None if missing.any() else read

    def reset(self) -> None:
        """Make the pipeline ready for the next order, after the last batch of one."""
        if self._pipeline is not None:
            self._pipeline.reset()

    def discard(self) -> list[MicroBatch]:
        """End the pipeline, and return the batches that were read ahead, in order."""
        ahead = [prepared.micro_batch for prepared in self._being_read]
        self._being_read.clear()
        self._unread = 0
        self._pipeline = None
        return ahead
