"""One optimizer step, as the training loop of a job sees it. An omitted or misplaced call raises an error."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.loading.loader import Batch
from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.stream import MicroBatch
from raydali.errors import UsageError
from raydali.launch.worker.step_context import StepContext
from raydali.measure.meter import EpochMeter
from raydali.train.membership import RankLostError
from raydali.train.step import ForwardBackward
from raydali.train.update_backup import never_waits


class Step:
    """One step of training, on one global batch. `TrainingRun.steps` yields it for a loop like this.

        for batch in step:
            step.backward(differentiated, batch["images"], batch["labels"])
        step.update(optimizer)

    Attributes:
        index: number of the step in the run.
        progress: share of the run's samples that are consumed in the middle of the step, 0..1, for learning rates.
        is_warm_up: whether the step trains on a resident batch and is undone afterwards.

    Args:
        finished: whether other ranks have finished it, and this one has joined them with their state.
    """

    def __init__(
        self,
        context: StepContext,
        batches: Iterator[Batch],
        meter: EpochMeter,
        *,
        index: int = 0,
        progress: float = 0.0,
        ends_epoch: bool = False,
        on_update: Callable[[list[MicroBatch]], None] | None = None,
        finished: bool = False,
    ) -> None:
        self.index, self.progress, self._ends_epoch = index, progress, ends_epoch
        self.is_warm_up = on_update is None
        self._context, self._batches, self._meter, self._on_update = context, batches, meter, on_update
        self._pending: Batch | None = None
        self._trained: list[MicroBatch] = []
        self._loss_and_images: torch.Tensor | None = None
        self._updated, self._finished_by_others, self._is_interrupted = False, finished, False
        self._summed: ForwardBackward | None = None
        self._end_all_reduce: Callable[[], None] = lambda: None
        self._recovery = None if self.is_warm_up else context.recovery
        if self.is_warm_up and context.recovery is not None:
            context.recovery.end_calls()
        self._micro_batches = context.micro_batches
        if finished:
            self._micro_batches = 0
        elif self._recovery is not None:
            self._micro_batches = self._recovery.begin_step(index)
        if not (self.is_warm_up or context.apart):
            context.worker.counts.begin_step(context.worker.sum_later)

    @property
    def ends_epoch(self) -> bool:
        """This is True if the step is the last one of its epoch, and no loss has interrupted it."""
        return self._ends_epoch and not self._is_interrupted

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches. Torch's random numbers are seeded before each of them.

        Raises:
            UsageError: the loop did not call `backward` for the previous micro-batch.
        """
        context, meter = self._context, self._meter
        if context.allreduce is not None:
            context.allreduce.sample(meter)
        nothing_left = len(self._trained) == self._micro_batches and not self._finished_by_others
        if nothing_left and context.apart and self._summed is None and context.differentiated is not None:
            if not self._trained:
                context.statistics.sit_out()
            self._all_reduce(context.differentiated)
            meter.end_exchange()
        while (index := len(self._trained)) < self._micro_batches and not self._finished_by_others:
            meter.enter("loader_wait")
            batch = next(self._batches)
            meter.first_batch()
            meter.enter("step")
            if context.allreduce is not None:
                context.allreduce.expect(meter if index == self._micro_batches - 1 else None)
            context.statistics.begin_micro_batch(index)
            _seed(int(keyed(context.seed, batch.micro_batch.number)) >> 1, context.worker.device)
            self._pending = batch
            yield batch
            self._require(self._pending is None, f"micro-batch {index} was not given to `step.backward`")

    def backward(self, differentiated: ForwardBackward, *inputs: Any) -> torch.Tensor:
        """Compute the loss of the newest micro-batch and its gradients; the last one all-reduces the gradients.

        Args:
            differentiated: made by `TrainingRun.differentiated`.
            inputs: arguments of `differentiated`, tensors of the micro-batch.

        Returns:
            The loss, a scalar on the device, valid until the next call.

        Raises:
            UsageError: it was already called for the newest micro-batch, or there is none yet.
        """
        batch, index, context = self._pending, len(self._trained), self._context
        if batch is None:
            raise self._error("`step.backward` was called twice for a micro-batch, or outside of `for batch in step`")
        if (counted := context.counted_flops) is not None:
            context.counted_flops = None
            counted(differentiated.flops_per_image(*inputs))
        last = index == self._micro_batches - 1
        loss = differentiated(*inputs, last=last and not differentiated.apart)
        context.statistics.end_micro_batch(index)
        images = len(batch.ids)
        if differentiated.apart:
            loss_and_images, before = torch.stack([loss * images, torch.full_like(loss, images)]), self._loss_and_images
            self._loss_and_images = loss_and_images if before is None else before + loss_and_images
        if last and differentiated.apart:
            self._all_reduce(differentiated)
        elif last:
            context.statistics.set_means()
            context.statistics.end_step()
        self._meter.add(loss, images)
        self._trained.append(batch.micro_batch)
        self._pending = None
        return loss

    def _all_reduce(self, differentiated: ForwardBackward) -> None:
        """Begin to sum the gradients, statistics, counts and loss over ranks; `_end_all_reduce` waits for the sums."""
        context, counts, meter = self._context, self._context.worker.counts, self._meter
        meter.exchange()
        like, of_loss = differentiated.like, self._loss_and_images
        mine = counts.taken(like), like.new_zeros(2) if of_loss is None else of_loss.to(like.dtype)
        self._summed, self._end_all_reduce = differentiated, _raise_lost
        with suppress(RankLostError):
            *sums, counted, of_loss = differentiated.all_reduce([*context.statistics.sums, *mine])
            if not context.has_updated:
                context.worker.queued()()
            counted, of_loss = _to_host(counted), _to_host(of_loss)
            wait = context.worker.queued()
            context.statistics.set_means(sums)

            def end() -> None:
                wait()
                counts.set_sums(counted)
                if not self.is_warm_up:
                    counts.of_epoch += of_loss
                context.statistics.end_step()

            self._end_all_reduce = end

    def update(
        self, optimizer: Optimizer, average: AveragedModel | None = None, *, max_norm: float | None = None
    ) -> None:
        """Update the weights with the step's gradients, clear the gradients, and update the moving average.

        Args:
            optimizer: the optimizer of the weights.
            average: the moving average of the weights, if the job keeps one.
            max_norm: the maximum norm of gradients, which are clipped to it; None for no clipping.

        Raises:
            UsageError: not all micro-batches of the step were trained on, or `update` was called before.
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks at the same step.
        """
        context = self._context
        left = self._micro_batches - len(self._trained)
        self._require(left <= 0, f"{left} of its {self._micro_batches} micro-batches were not trained on")
        self._require(not self._updated, "`step.update` was called twice")
        context.learning_rate = optimizer.param_groups[0]["lr"]
        if self.is_warm_up:
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # the weights do not change, so losses remain finite
        context.before_update()
        self._updated = True
        if not self._finished_by_others:  # otherwise the weights are already those after the update
            try:
                self._apply(optimizer, average, max_norm)
            except RankLostError:
                self._recover()
                if self._is_interrupted:
                    return
                optimizer.zero_grad(set_to_none=True)
        context.worker.counts.end_step()
        if self._recovery is not None:
            self._recovery.end_step(self.index, ends_epoch=self.ends_epoch)
        self._meter.enter("loop")
        if self._on_update is not None:
            self._on_update(self._trained)

    def _apply(self, optimizer: Optimizer, average: AveragedModel | None, max_norm: float | None) -> None:
        """Update the weights. If ranks can be lost, the GPU gets the update before the host waits for the sums.

        Raises:
            RankLostError: ranks were lost; `_recover` is next.
        """
        context, scaler, backup = self._context, self._context.precision.scaler, self._context.backup
        is_lost = self._end_all_reduce is _raise_lost
        is_queued = backup is not None and never_waits(optimizer, scaler) and not is_lost
        if backup is not None and is_queued:
            backup.take(context.model, optimizer, average)
        else:
            self._end_all_reduce()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(context.model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update_parameters(context.model)
        optimizer.zero_grad(set_to_none=True)
        if backup is not None and is_queued:
            self._end_all_reduce()
            backup.drop()
        context.has_updated = True

    def _recover(self) -> None:
        """Undo the update after a loss, and find what this rank is to do among the remaining ones.

        A warm-up step needs no sums: ranks agree in the first step.
        """
        context = self._context
        if self._summed is None or context.backup is None or context.worker.membership is None:
            raise RankLostError
        context.backup.restore()
        self._summed.undo_all_reduce()
        if self._recovery is None:
            context.statistics.discard_step()
            context.worker.membership.leave_calls()
            return
        self._finished_by_others = self._recovery.recover(self.index)
        self._micro_batches = self._recovery.micro_batches(self.index)
        self._is_interrupted = not self._finished_by_others

    def goes_on(self) -> bool:
        """Return whether a loss has interrupted the step: then the training loop gets it once more.

        It has the micro-batches that lost ranks have left to this one, if any; gradients of the others are kept.
        """
        if not self._is_interrupted:
            return False
        self._is_interrupted, self._updated, self._summed = False, False, None
        return True

    def check_end(self) -> None:
        """Check that the step is complete.

        Raises:
            UsageError: `update` was not called.
        """
        self._require(self._updated, "`step.update` was not called")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise self._error(otherwise)

    def _error(self, text: str) -> UsageError:
        return UsageError(f"the training loop is wrong: in step {self.index} {text}; see docs/own-data.md for the loop")


def _raise_lost() -> None:
    raise RankLostError


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which a GPU makes later."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the random numbers on the host and on this device; `torch.manual_seed` takes longer for all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
