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

from raydali.data.loading.quarantine import Quarantine, may_pass
from raydali.data.sources import storage
from raydali.data.sources.reading import Cause, Patience, PythonCpuTime, WaitTimer, reading_seconds
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch
from raydali.data.tasks.pipeline import Inputs, Pipeline
from raydali.errors import DataError, StorageAway

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
    """A RuntimeError of `pipeline.inputs`. Its own type keeps it apart from DALI's errors, which are RuntimeErrors.

    Attributes:
        error: the original one.
    """

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class InputPrefetcher:
    """Makes `pipeline.inputs` of micro-batches in threads, PREFETCHED_INPUTS ahead, and hands them out in order.

    Args:
        source, pipeline, quarantine, waits, python: the loader's.
        threads: number of threads; more than one hides the latency of files, and costs time if none are read.
    """

    def __init__(
        self,
        source: Source,
        pipeline: Pipeline[Any],
        quarantine: Quarantine,
        waits: WaitTimer,
        python: PythonCpuTime,
        *,
        threads: int = PREFETCHED_INPUTS,
    ) -> None:
        self._source, self._pipeline, self._quarantine, self._waits = source, pipeline, quarantine, waits
        self._running = python.running if pipeline.inputs_are == "python" else nullcontext
        self._threads = ThreadPoolExecutor(threads)
        self._prepared: Iterator[PreparedInputs] = iter(())
        self._pending: deque[tuple[MicroBatch, Future[PreparedInputs]]] = deque()
        self._failures = 0
        self._read_shares: dict[int, float] = {}

    def begin(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Prepare these micro-batches from now on."""
        self._prepared = self._prepare(micro_batches)

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
                prepared = self._make(prepared.micro_batch)
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
        self._prepared = chain(map(self._make, micro_batches), self._prepared)

    def again(self, micro_batch: MicroBatch) -> PreparedInputs:
        """Return a micro-batch with substitutes for samples that were found broken since; it may be empty."""
        return self._make(micro_batch)

    @property
    def ready(self) -> int:
        """The number of prepared micro-batches, PREFETCHED_INPUTS at most."""
        return sum(inputs.done() for _, inputs in tuple(self._pending))

    def close(self) -> None:
        """Stop the threads, without waiting for their current work."""
        self._threads.shutdown(cancel_futures=True)

    def _prepare(self, micro_batches: Iterator[MicroBatch]) -> Iterator[PreparedInputs]:
        def submit(micro_batch: MicroBatch) -> tuple[MicroBatch, Future[PreparedInputs]]:
            return micro_batch, self._threads.submit(self._make, micro_batch)

        submitted = map(submit, micro_batches)
        pending = self._pending = deque(islice(submitted, PREFETCHED_INPUTS))
        while pending:
            micro_batch, inputs = pending.popleft()
            pending.extend(islice(submitted, 1))
            with self._waits.by(partial(self._unprepared_by, micro_batch.number)):
                made = inputs.result()
            yield made

    def _make(self, micro_batch: MicroBatch) -> PreparedInputs:
        patience = Patience(self._quarantine.storage)
        try:
            while (prepared := self._made(micro_batch, patience)) is None:
                pass
            return prepared
        finally:
            patience.end()

    def _made(self, micro_batch: MicroBatch, patience: Patience) -> PreparedInputs | None:
        """The inputs; None if they must be made again: a sample is broken, or the storage did not answer."""
        version, settled, quarantine = self._version, micro_batch, self._quarantine
        if quarantine.known:
            settled = quarantine.with_substitutes(micro_batch)
        if not len(settled.ids):
            return PreparedInputs(settled, (), version)
        began, read = time.perf_counter(), reading_seconds()
        try:
            with self._running():
                pipeline = self._pipeline.in_epoch(settled.counts_to)
                inputs = pipeline.inputs(self._source, settled.read_ids, settled.draw_keys)
        except OSError as error:  # its message names the file
            if quarantine.examine(settled.read_ids, again=True) or patience.pause(error):
                return None
            kind = StorageAway if may_pass(error) else DataError
            raise kind(str(error)) from error
        except RuntimeError as error:
            raise InputsError(error) from error
        self._read_shares[micro_batch.number] = (reading_seconds() - read) / (time.perf_counter() - began)
        return PreparedInputs(settled, inputs, version)

    @property
    def _version(self) -> int:
        """The version of what is known about broken samples: it grows."""
        return len(self._quarantine.known) + self._failures

    def _unprepared_by(self, number: int, seconds: float) -> dict[Cause, float]:
        read = self._read_shares.pop(number, 0.0)
        return {"storage": read * seconds, self._pipeline.inputs_are: (1 - read) * seconds}


class BatchReader:
    """Reads batches ahead. DALI's pipeline ends with an error if a file is missing: its batches are then read here.

    Args:
        prefetcher, quarantine, waits: the loader's.
        files: number of image files of a sample.
        threads: number of threads of the loader.
        dali_reads: whether the inputs are paths, see `Source.dali_reads`; otherwise they are contents.
    """

    def __init__(
        self,
        prefetcher: InputPrefetcher,
        quarantine: Quarantine,
        waits: WaitTimer,
        *,
        files: int,
        threads: int,
        dali_reads: bool,
    ) -> None:
        self._prefetcher, self._quarantine, self._waits = prefetcher, quarantine, waits
        self._files, self._threads, self._dali_reads = files, min(READING_THREADS, threads), dali_reads
        self._batch_size = 0
        self._pipeline: dali.Pipeline | None = None
        self._being_read: deque[PreparedInputs] = deque()
        self._unread = 0  # batches being read whose pipeline failed

    def build(self, batch_size: int) -> None:
        """Build DALI's pipeline for batches of at most this size, which begins to read when it is asked for one."""
        self._batch_size = batch_size
        self._pipeline = dali.Pipeline(
            batch_size=batch_size, num_threads=self._threads, device_id=None, prefetch_queue_depth=READ_BATCHES
        )
        with self._pipeline:
            files = fn.external_source(self._next_files, num_outputs=self._files, batch=True, no_copy=True)
            read = [fn.io.file.read(each, dont_use_mmap=True) if self._dali_reads else each for each in files]
            self._pipeline.set_outputs(*read)
        self._pipeline.build()

    def _next_files(self) -> Inputs:
        prepared = self._prefetcher.take()
        self._being_read.append(prepared)
        return prepared.inputs[: self._files]

    def take(self) -> tuple[PreparedInputs, Contents | None]:
        """Return the next batch and its contents, which are None if they must be read by `read_here`.

        Raises:
            StopIteration: there is no further batch.
        """
        contents = self._read_by_dali()
        return self._being_read.popleft(), contents

    def _read_by_dali(self) -> Contents | None:
        if not self._unread:
            if self._pipeline is None:
                self.build(self._batch_size)
            assert self._pipeline is not None
            try:
                with self._waits.on("storage"):
                    contents: Contents = self._pipeline.run()
                    return contents
            except RuntimeError:
                if not self._being_read:
                    raise
                self._unread = len(self._being_read)
                self._end_pipeline()
        self._unread -= 1
        return None

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
            missing = np.array([[each is None or not len(each) for each in column] for column in read]).any(0)
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

    def _end_pipeline(self) -> None:
        self._pipeline = None
        gc.collect()  # DALI's graph is a reference cycle that keeps its threads alive
