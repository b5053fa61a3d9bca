"""Prepares batches ahead of DALI, on threads: everything that Python does for a batch.

    micro-batches --> read --> screen -------> inputs ------> Prepared, in order --> DALI decodes, augments
                      read/    screening.py    the task       PREPARED ahead         dali_loader.py

Broken samples are replaced on the way (quarantine.py).
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice

from raydali.data.broken.screening import Read, Screening
from raydali.data.load.depths import PREPARED
from raydali.data.load.loader import Loader
from raydali.data.read.contents import Contents, Failed
from raydali.data.read.reading import Cause, WaitTimer, reading_seconds, shares
from raydali.data.stream.stream import MicroBatch, joined
from raydali.data.tasks.pipeline import Device, Inputs, SampleErrors, Samples


@dataclass(frozen=True, slots=True)
class Prepared:
    """A micro-batch that is ready for DALI.

    Attributes:
        micro_batch: with substitutes for samples known as broken; empty if all of them are left out.
        inputs: of the graph.
        read: the image files among them.
        seconds: the time that it took, by cause.
        failures: how often DALI had failed before.
    """

    micro_batch: MicroBatch
    inputs: Inputs = ()
    read: Read | None = None
    seconds: dict[Cause, float] | None = None
    failures: int = -1


class Preparation:
    """Prepares the micro-batches of a loader, PREPARED ahead, and hands them out in order.

    Args:
        loader: whose pipeline, source, quarantine and timers it uses.
        screening: of the loader.
        device: where the graph runs.
    """

    def __init__(self, loader: Loader, screening: Screening, device: Device) -> None:
        self._loader, self._screening, self._device = loader, screening, device
        self._running = loader.python.running if loader.pipeline.inputs_are == "python" else nullcontext
        self._threads = ThreadPoolExecutor(PREPARED, thread_name_prefix="preparation")
        self._prepared: Iterator[Prepared] = iter(())
        self._pending: deque[Future[Prepared]] = deque()
        self._failures = 0
        self._waits = loader.waits

    def begin(self, micro_batches: Iterator[MicroBatch], together: int = 1) -> None:
        """Prepare these micro-batches from now on, so many joined in one."""
        self._prepared = self._prepare_ahead(self._grouped(micro_batches, together))

    def take(self, waits: WaitTimer) -> Prepared | None:
        """Return the next one that is not empty, prepared again if a sample was found broken since; None at the end.

        Args:
            waits: counts the time until it is prepared.

        Raises:
            Exception: see `Quarantine.load`.
        """
        self._waits = waits
        for prepared in self._prepared:
            if self._is_outdated(prepared):
                prepared = self._prepare(prepared.micro_batch)
            if len(prepared.micro_batch.ids):
                return prepared
        return None

    def again(self, micro_batches: list[MicroBatch]) -> None:
        """Prepare these micro-batches again, before the others: DALI failed on one of them."""
        self._failures += 1
        self._prepared = chain(map(self._prepare, micro_batches), self._prepared)

    @property
    def ready(self) -> int:
        """The number of prepared micro-batches, PREPARED at most."""
        return sum(prepared.done() for prepared in tuple(self._pending))

    def close(self) -> None:
        """Stop the threads, without waiting for their current work."""
        self._threads.shutdown(cancel_futures=True)

    def _is_outdated(self, prepared: Prepared) -> bool:
        """Return whether one of its samples was found broken since, or perhaps a file that DALI does not decode."""
        known, ids = self._loader.quarantine.known, prepared.micro_batch.read_ids
        return prepared.failures != self._failures or (bool(known) and any(id in known for id in ids.tolist()))

    def _prepare_ahead(self, micro_batches: Iterator[MicroBatch]) -> Iterator[Prepared]:
        submitted = (self._threads.submit(self._prepare, micro_batch) for micro_batch in micro_batches)
        pending = self._pending = deque(islice(submitted, PREPARED))
        while pending:
            prepared = pending.popleft()
            pending.extend(islice(submitted, 1))
            with self._waits.by(partial(_split_wait, prepared)):
                prepared.exception()  # waits
            yield prepared.result()

    def _grouped(self, micro_batches: Iterator[MicroBatch], together: int) -> Iterator[MicroBatch]:
        """Join up to so many micro-batches for which the pipeline is the same."""
        for _, group in groupby(
            micro_batches, lambda micro_batch: self._loader.pipeline.in_epoch(micro_batch.counts_to)
        ):
            while part := [*islice(group, together)]:
                yield joined(part)

    def _prepare(self, micro_batch: MicroBatch) -> Prepared:
        settled, prepared = self._loader.quarantine.load(micro_batch, partial(self._prepare_once, self._failures))
        return prepared or Prepared(settled, failures=self._failures)

    def _prepare_once(self, failures: int, micro_batch: MicroBatch) -> Prepared:
        """Return a micro-batch with the samples that it has. Raises SampleErrors, or an error of the task."""
        pipeline, source = self._loader.pipeline.in_epoch(micro_batch.counts_to), self._loader.source
        ids, images = micro_batch.read_ids, pipeline.image_files
        began, read_before = time.perf_counter(), reading_seconds()
        contents = [_sound(files.contents(ids)) for files in pipeline.files(source)]
        read_at = time.perf_counter()
        read = Read(ids, contents[:images]) if images else None
        shapes = self._screening.shapes(read) if read is not None else []
        screened_at = time.perf_counter()
        samples = Samples(ids, micro_batch.draw_keys, shapes, contents[images:], self._device)  # type: ignore[arg-type]
        with self._running():
            inputs = pipeline.inputs(source, samples)
        reading = reading_seconds() - read_before
        seconds: dict[Cause, float] = {"storage": reading, "cpu decode": screened_at - read_at}
        others = max(0.0, time.perf_counter() - began - sum(seconds.values()))
        seconds[pipeline.inputs_are] = seconds.get(pipeline.inputs_are, 0.0) + others
        return Prepared(micro_batch, (*(read.for_dali if read is not None else ()), *inputs), read, seconds, failures)


def _sound(contents: Contents) -> Contents:
    """Return contents of which none has failed; raises SampleErrors otherwise."""
    if contents.tensors is None:
        failed = {place: content.error for place, content in enumerate(contents) if isinstance(content, Failed)}
        if failed:
            raise SampleErrors(failed)
    return contents


def _split_wait(prepared: "Future[Prepared]", seconds: float) -> dict[Cause, float]:
    """Divide the seconds of waiting for a batch as its preparation was divided."""
    if prepared.cancelled() or prepared.exception() is not None or not (parts := prepared.result().seconds):
        return {"storage": seconds}
    return shares(seconds, parts)
