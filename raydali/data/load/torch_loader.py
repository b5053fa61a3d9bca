"""The baseline loader: torch's DataLoader with Pillow and torchvision, over the same stream and random numbers."""

import gc
import re
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import chain
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Unpack

import torch
import torchvision.transforms.v2  # noqa: F401 (takes seconds: here once, instead of in each worker process)
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from raydali.data.broken.quarantine import BrokenSample, Quarantine
from raydali.data.decode.pillow import apart
from raydali.data.index.source import Source
from raydali.data.load.loader import Batch, Loader, LoaderOptions
from raydali.data.read.read_counts import COUNTS, Counts
from raydali.data.read.reading import OUTAGES, Cause, Outage, reading_seconds
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.pipeline import Pipeline, of_each
from raydali.errors import DataError, StorageAway

_DEATH_SECONDS = 1.0
"""A process has ended at most so long after its connections are closed."""


class Loaded(NamedTuple):
    """A micro-batch from a worker process, with substitutes for broken samples or without them."""

    micro_batch: MicroBatch
    tensors: list[torch.Tensor]
    """The outputs of the pipeline; none if all samples are left out."""
    broken: list[BrokenSample]
    outages: list[Outage]
    counts: Counts


class TorchLoader(Loader):
    """Decodes and augments in `threads` worker processes; ids, crops and flips are the DALI loader's."""

    def __init__(self, source: Source, pipeline: Pipeline[Any], order: Order, **options: Unpack[LoaderOptions]) -> None:
        super().__init__(source, pipeline, order, **options)
        self._plan = _Plan()
        self._times = torch.zeros(self.threads, 2, dtype=torch.float64).share_memory_()
        self._loader = DataLoader(
            _MicroBatches(self.source, self.pipeline, self._times, self.quarantine),
            batch_size=None,
            sampler=self._plan,
            num_workers=self.threads,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            # With another method each worker would import torch again.
            multiprocessing_context="fork",
            worker_init_fn=_keep_inherited,
        )

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        self._plan.start(micro_batches)
        loaded = self._start_workers()
        while True:
            try:
                with self.waits.by(self._split_wait):
                    batch = next(loaded)
            except StopIteration:
                return
            except (DataError, StorageAway) as error:
                # The DataLoader puts the worker's traceback before the message, which may have several lines.
                message = re.split(rf"(?m)^raydali\.errors\.{type(error).__name__}: ", str(error))[-1]
                raise type(error)(message.rstrip()) from error
            except (RuntimeError, OSError, EOFError):
                if not self._suspects_batches():
                    raise
                with suppress(RuntimeError):  # again of torch's handler
                    self._end_workers()
                self._plan.start(chain([*self._plan.under_way], self._plan.micro_batches))
                loaded = self._start_workers()
                continue
            self.quarantine.record(batch.broken)
            OUTAGES.add(batch.outages)
            COUNTS.add(**asdict(batch.counts))
            self._plan.under_way.popleft()
            if batch.tensors:
                named = zip(self.pipeline.outputs, batch.tensors, strict=True)
                yield Batch({name: self._to_device(tensor) for name, tensor in named}, batch.micro_batch)

    def _start_workers(self) -> Iterator[Loaded]:
        collects = gc.isenabled()
        gc.disable()  # in the workers too, until `_keep_inherited`
        try:
            return iter(self._loader)
        finally:
            if collects:
                gc.enable()

    def _suspects_batches(self) -> bool:
        """Suspect the samples in flight if a worker has died; return whether any was not suspected before."""
        suspects = {id for micro_batch in self._plan.under_way for id in micro_batch.ids.tolist()}
        workers: Any = self._loader._iterator
        try:
            has_died = bool(wait([worker.sentinel for worker in workers._workers], _DEATH_SECONDS))
        except RuntimeError:  # of torch's handler of SIGCHLD
            has_died = True
        if not has_died or not self.pipeline.image_files or suspects <= self.quarantine.in_flight_at_death:
            return False
        self.quarantine.in_flight_at_death |= suspects
        return True

    def _split_wait(self, seconds: float) -> dict[Cause, float]:
        read, whole = self._times.sum(0).tolist()
        storage = read / whole if whole else 0.0
        return {"storage": storage * seconds, "cpu decode": (1 - storage) * seconds}

    @property
    def prepared_batches(self) -> int:
        """Batches that the worker processes have loaded, without those that arrived out of turn."""
        loaded: Any = self._loader._iterator
        return 0 if loaded is None else int(loaded._data_queue.qsize())

    def close(self) -> None:
        """End the worker processes."""
        super().close()
        self._end_workers()

    def _end_workers(self) -> None:
        # To drop the DataLoader is not enough: an error's traceback may keep its iterator alive for long.
        workers: Any = self._loader._iterator
        self._loader._iterator = None
        if workers is not None:
            workers._shutdown_workers()


def _keep_inherited(_worker: int) -> None:
    """Never let a worker, a fork, collect a DALI pipeline of its parent: it would wait for threads that it lacks."""
    gc.freeze()
    gc.enable()


class _MicroBatches(Dataset[Loaded]):
    """Micro-batches, with substitutes for broken samples, which each worker process finds for itself."""

    def __init__(self, source: Source, pipeline: Pipeline[Any], times: torch.Tensor, quarantine: Quarantine) -> None:
        self.source, self.pipeline, self.quarantine = source, pipeline, quarantine
        self._times = times  # of each worker: seconds of reading, and of all it does

    def __getitem__(self, micro_batch: MicroBatch) -> Loaded:
        began, read = time.perf_counter(), reading_seconds()
        pipeline, suspected = self.pipeline.in_epoch(micro_batch.counts_to), self.quarantine.in_flight_at_death

        @cache
        def sample(id: int, key: int) -> tuple[torch.Tensor, ...]:
            with apart(id in suspected):
                return pipeline.sample(self.source, id, key)

        def collated(settled: MicroBatch) -> list[torch.Tensor]:
            samples: list[torch.Tensor] = default_collate(of_each(sample, *zip(*settled.keys, strict=True)))
            return samples

        settled, tensors = self.quarantine.load(micro_batch, collated)
        worker = get_worker_info()
        assert worker is not None, "samples are loaded in worker processes"
        spent = reading_seconds() - read, time.perf_counter() - began
        self._times[worker.id] += torch.tensor(spent, dtype=torch.float64)
        return Loaded(settled, tensors or [], self.quarantine.drain_new(), OUTAGES.take(), COUNTS.take())


class _Plan:
    """The DataLoader's sampler: it remembers each micro-batch until it comes back."""

    def __init__(self) -> None:
        self.start(iter(()))

    def start(self, micro_batches: Iterator[MicroBatch]) -> None:
        self.micro_batches, self.under_way = micro_batches, deque[MicroBatch]()

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self.micro_batches:
            self.under_way.append(micro_batch)
            yield micro_batch
