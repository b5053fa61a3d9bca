"""The baseline loader: torch's DataLoader with Pillow and torchvision, over the same stream and random numbers."""

import gc
import re
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import wait
from typing import Any, Unpack

import numpy as np
import torch
import torchvision.transforms.v2  # noqa: F401 (takes seconds: here once, instead of in each worker process)
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.loading.quarantine import BrokenSample, Quarantine, unreadable
from raydali.data.sources.reading import OUTAGES, Cause, Outage, Patience, reading_seconds
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.pillow import apart
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import DataError, StorageAway

Key = tuple[int, int, int]
"""The id and the epoch of a sample, and the epoch to which its step counts."""
Loaded = tuple[tuple[torch.Tensor, ...] | None, int | None, list[BrokenSample], list[Outage]]
"""A sample, the id it was read from, what was found to be broken on the way, and when the storage was away; None for
one that is left out."""
_DEATH_SECONDS = 1.0
"""A process has ended at most so long after its connections are closed."""
Collated = tuple[list[torch.Tensor], list[int | None], list[BrokenSample], list[Outage]]


class TorchLoader(Loader):
    """Decodes and augments in `threads` worker processes; ids, crops and flips are the DALI loader's."""

    def __init__(self, source: Source, pipeline: Pipeline[Any], order: Order, **options: Unpack[LoaderOptions]) -> None:
        super().__init__(source, pipeline, order, **options)
        self._plan = _Plan()
        self._times = torch.zeros(self.threads, 2, dtype=torch.float64).share_memory_()
        self._loader = DataLoader(
            _Samples(self.source, self.pipeline, self._times, self.quarantine),
            batch_sampler=self._plan,
            collate_fn=_collated,
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
                    tensors, read, broken, outages = next(loaded)
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
            self.quarantine.record(broken)
            OUTAGES.add(outages)
            micro_batch = _as_read(self._plan.under_way.popleft(), read)
            if len(micro_batch.ids):
                named = zip(self.pipeline.outputs, tensors, strict=True)
                yield Batch({name: self._to_device(tensor) for name, tensor in named}, micro_batch)

    def _start_workers(self) -> Iterator[Collated]:
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
            has_died = bool(wait([each.sentinel for each in workers._workers], _DEATH_SECONDS))
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


class _Samples(Dataset[Loaded]):
    """Samples, with substitutes for broken ones; each worker process finds out for itself which are broken."""

    def __init__(self, source: Source, pipeline: Pipeline[Any], times: torch.Tensor, quarantine: Quarantine) -> None:
        self.source, self.pipeline, self.quarantine = source, pipeline, quarantine
        self._times = times  # of each worker: seconds of reading, and of all it does

    def __getitem__(self, key: Key) -> Loaded:
        id, epoch, counts_to = key
        began, read = time.perf_counter(), reading_seconds()
        sample, used = None, self.quarantine.substitute_for(id, epoch)
        patience = Patience(self.quarantine.storage)
        while used is not None and sample is None:
            try:
                with apart(used in self.quarantine.in_flight_at_death):
                    pipeline = self.pipeline.in_epoch(counts_to)
                    sample = self.quarantine.noticing(partial(pipeline.sample, self.source, used, epoch))
            except Exception as error:
                if not self.quarantine.examine([used], again=True):
                    if isinstance(error, OSError) and patience.pause(error):
                        continue
                    patience.end()
                    text = f"sample {used} cannot be read: {self.source.path(used)}: {error}"
                    raise unreadable(text, error) from error
                used = self.quarantine.substitute_for(id, epoch)
        patience.end()
        worker = get_worker_info()
        assert worker is not None, "samples are loaded in worker processes"
        spent = reading_seconds() - read, time.perf_counter() - began
        self._times[worker.id] += torch.tensor(spent, dtype=torch.float64)
        return sample, used, self.quarantine.drain_new(), OUTAGES.take()


def _collated(loaded: list[Loaded]) -> Collated:
    samples = [each[0] for each in loaded if each[0] is not None]
    broken, outages = [one for each in loaded for one in each[2]], [one for each in loaded for one in each[3]]
    return default_collate(samples) if samples else [], [each[1] for each in loaded], broken, outages


def _as_read(micro_batch: MicroBatch, read: list[int | None]) -> MicroBatch:
    """The micro-batch with the substitutes that were read, and without samples that have none."""
    kept = np.array([id is not None for id in read], np.bool_)
    ids = micro_batch.ids[kept]
    used = np.array([id for id in read if id is not None], np.int64)
    replaced_by = np.where(used == ids, -1, used) if (used != ids).any() else None
    return replace(micro_batch, ids=ids, epochs=micro_batch.epochs[kept], replaced_by=replaced_by)


class _Plan:
    """The DataLoader's batch sampler: the keys of each micro-batch, which is remembered until it comes back."""

    def __init__(self) -> None:
        self.start(iter(()))

    def start(self, micro_batches: Iterator[MicroBatch]) -> None:
        self.micro_batches, self.under_way = micro_batches, deque[MicroBatch]()

    def __iter__(self) -> Iterator[list[Key]]:
        for micro_batch in self.micro_batches:
            self.under_way.append(micro_batch)
            keys = zip(micro_batch.ids.tolist(), micro_batch.draw_keys.tolist(), strict=True)
            yield [(id, draw_key, micro_batch.counts_to) for id, draw_key in keys]
