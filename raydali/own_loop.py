"""Measuring for a training loop of your own, with raydali's loader, in Ray Train, torchrun or a plain process.

    for epoch in measured(loader):
        for batch in epoch:              waiting for a batch is the loader's time, all until the next one the step's
            loss = ...
            epoch.add(loss)
        record = epoch.record()          of all ranks, on rank 0

The jobs of raydali do the same by themselves (launch/worker/training_run.py).
"""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from raydali.data.load.loader import Batch, Loader
from raydali.data.stream.stream import Stream
from raydali.errors import UsageError
from raydali.measure.meter import EpochMeter
from raydali.measure.records import epoch_record, segment_of
from raydali.text import plural
from raydali.training.worker import Worker


def measured(loader: Loader) -> Iterator["Epoch"]:
    """Yield the epochs that are left of a loader's stream; iterate over each for its batches.

    All ranks must run the same loop. Global batches are not cut: an epoch ends with the first one that reaches its end.

    Args:
        loader: of a `Stream`; the first epoch begins at the loader's `start`.

    Raises:
        TypeError: the loader's order is no Stream.
        UsageError: ranks would get unequal numbers of batches, and DistributedDataParallel would hang.
    """
    stream = loader.order
    if not isinstance(stream, Stream):
        raise TypeError(f"only a Stream has epochs to measure, not {type(stream).__name__}")
    if stream.micro_batches_per_step % loader.world_size:
        raise UsageError(
            f"{plural(loader.world_size, 'worker')} cannot share {plural(stream.micro_batches_per_step, 'batch')} of a "
            f"step ({stream.global_batch_size} / {stream.batch_size}) equally: use a number that divides them"
        )
    return _epochs(loader, stream)


def _epochs(loader: Loader, stream: Stream) -> Iterator["Epoch"]:
    batches = iter(loader)
    who: dict[str, Any] = {"rank": loader.rank, "world_size": loader.world_size, "node": platform.node()}
    meter = EpochMeter(loader.device, **who, loader=loader)
    while stream.steps_of(loader.state_dict()) < stream.steps:
        yield Epoch(loader, stream, batches, meter)
        meter.reset()


class Epoch:
    """One epoch of this rank: yields its batches and measures their use; made by `measured`.

    After a resume in the middle of an epoch it is the rest of that epoch.
    """

    def __init__(self, loader: Loader, stream: Stream, batches: Iterator[Batch], meter: EpochMeter) -> None:
        self._loader, self._stream, self._batches, self._meter = loader, stream, batches, meter
        self._newest: Batch | None = None
        self._counted = self._has_loss = False
        self._no_loss = torch.zeros((), device=loader.device)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches up to the epoch's end. The time between epochs counts to none."""
        done = False
        while not done:
            self._meter.enter("loader_wait")
            self._newest, self._counted = next(self._batches), False
            self._meter.replaced += self._newest.micro_batch.replaced
            self._meter.first_batch()
            self._meter.enter("step")
            yield self._newest
            self._count(self._no_loss)
            if self.ends_step:
                self._meter.end_step()
            done = self.ends_step and self._stream.epoch_closed_by(self._newest.micro_batch.step) is not None
        self._meter.enter("validation")

    @property
    def ends_step(self) -> bool:
        """True if the newest batch is this rank's last one of its global batch: the optimizer's step is due."""
        assert self._newest is not None, "no batch was taken yet"
        index = self._newest.micro_batch.index
        return index + self._loader.world_size >= self._stream.micro_batches_per_step

    def add(self, loss: torch.Tensor) -> None:
        """Note the newest batch's mean loss; nothing waits for the device. Without any the record's loss is None."""
        self._has_loss = True
        self._count(loss)

    def _count(self, loss: torch.Tensor) -> None:
        if self._newest is not None and not self._counted:
            self._meter.add(loss, len(self._newest.ids))
            self._counted = True

    def record(
        self, *, learning_rate: float | None = None, validation: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return what all ranks measured, as a line of a run's `epochs.jsonl`, on rank 0; elsewhere None.

        All ranks must call it: facts travel by torch.distributed's default group. Times are in seconds, rates in images
        a second over all ranks; what a loop of your own does not measure, such as the ceiling, is None.

        Args:
            learning_rate: copied into the record.
            validation: copied into the record.
        """
        loader, stream = self._loader, self._stream
        worker = Worker(
            rank=loader.rank,
            world_size=loader.world_size,
            device=loader.device,
            cpus=loader.threads,
            node=platform.node(),
        )
        self._count(self._no_loss)
        records = segment_of(worker.gather(asdict(self._meter.record())))
        if not records:
            return None
        state = loader.state_dict()
        step = stream.steps_of(state)
        closed = stream.epoch_closed_by(step - 1)
        record = epoch_record(
            [records],
            epoch=stream.epoch_of(step) if closed is None else closed,
            step=step,
            samples_consumed=state["samples_consumed"],
            learning_rate=learning_rate,
            validation=validation,
            quarantined=sum(record.replaced for record in records),
            ceiling_images_per_second=None,
        )
        return record if self._has_loss else record | {"loss": None}
