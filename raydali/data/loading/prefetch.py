"""Prefetches the inputs of micro-batches for DALI, with substitutes for broken samples."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from raydali.data.loading.quarantine import Quarantine
from raydali.data.loading.read_errors import may_pass
from raydali.data.sources.read_timing import Cause, PythonCpuTime, WaitTimer, reading_seconds
from raydali.data.sources.retry import Patience
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch
from raydali.data.tasks.pipeline import Inputs, Pipeline
from raydali.errors import DataError, StorageAway

PREFETCHED_INPUTS = 4
"""Batches whose inputs are prefetched, concurrently to hide object-store latency."""


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
        patience = self._quarantine.patience()
        try:
            while (prepared := self._made(micro_batch, patience)) is None:
                pass
            return prepared
        finally:
            patience.end()

    def _made(self, micro_batch: MicroBatch, patience: Patience) -> PreparedInputs | None:
        """The inputs; None if they must be made again: a sample is broken, or the storage did not answer."""
        version, settled = self._version, self._quarantine.with_substitutes(micro_batch)
        if not len(settled.ids):
            return PreparedInputs(settled, (), version)
        began, read = time.perf_counter(), reading_seconds()
        try:
            with self._running():
                pipeline = self._pipeline.in_epoch(settled.counts_to)
                inputs = pipeline.inputs(self._source, settled.read_ids, settled.draw_keys)
        except OSError as error:  # its message names the file
            if self._quarantine.examine(settled.read_ids, again=True) or patience.pause(error):
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
