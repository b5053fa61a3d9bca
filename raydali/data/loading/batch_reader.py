"""Reads the image files of micro-batches ahead of their decoding: by a DALI pipeline, or here where that has failed."""

import gc
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import nvidia.dali as dali
from numpy.typing import NDArray
from nvidia.dali import fn

from raydali.data.loading.prefetch import InputPrefetcher, PreparedInputs
from raydali.data.loading.quarantine import Quarantine
from raydali.data.sources import storage
from raydali.data.sources.read_timing import WaitTimer
from raydali.data.stream.stream import MicroBatch
from raydali.data.tasks.pipeline import Inputs

READ_BATCHES = 2
"""Batches whose files are read ahead of their decoding."""
READING_THREADS = 4

Contents = Sequence[Sequence[Any]]
"""For each image file of a sample, the contents of a batch: arrays, or a list of DALI."""


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
