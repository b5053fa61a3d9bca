"""One optimizer step, as the training loop of a job sees it. An omitted or misplaced call raises an error."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.load.loader import Batch
from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.stream import MicroBatch
from raydali.errors import UsageError
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.rank_comparison import RankComparison
from raydali.launch.worker.run_state import RunState, ceiling_conditions
from raydali.launch.worker.session import Session
from raydali.measure.memory import OUT_OF_MEMORY
from raydali.measure.meter import EpochMeter
from raydali.options.every_job import TrainingOptions
from raydali.run.sample_trace import SampleTrace
from raydali.training.bad_losses import LossWatch
from raydali.training.checkpoint_file import is_sharded
from raydali.training.evaluation.validation import ValidationForward
from raydali.training.forward_backward import ForwardBackward, Precision


class RunParts:
    """The parts of a run on this rank, which its loop, its steps and its warm-up share.

    Attributes:
        state: the state in checkpoints; it is loaded, except for the parts that the job registers.
        trace: the trace of samples, if there is one.
        micro_batches: number of micro-batches of a global batch that this rank trains on.
        sharding: what shards the model; None: each rank has the whole model.
        captures: whether forward and backward of a micro-batch are one CUDA graph.
        differentiated: the functions that the steps call, which the job adds.
        watch: watches the losses of steps.
        inferences: what the validation computes, with the name of its input; the job adds them, the warm-up takes them.
    """

    def __init__(self, config: TrainingOptions, session: Session, samples: int) -> None:
        self.config, self.session, self.worker = config, session, session.worker
        self.stream, self.on_gpu = config.stream(samples, session.class_labels), self.worker.device.type == "cuda"
        self.precision = Precision(config.precision, self.worker.device)
        self.broken = BrokenSamples(config, session, samples=samples)
        self.trace = SampleTrace(session.folder, self.worker.rank) if config.trace_samples else None
        several = self.stream.micro_batches_per_step > self.worker.world_size
        self.sharding = None
        if (shards := config.sharded_over(self.worker.world_size)) > 1:
            from raydali.training.sharding import Sharding  # not before: it takes half a second

            dtype, timeout = self.precision.dtype, config.group_timeout
            self.sharding = Sharding(self.worker, shards, dtype, several=several, timeout=timeout)
        conditions = ceiling_conditions(config, self.worker)
        ranks = RankComparison(session, config.compare_ranks, shards)
        self.state = RunState(session, self.stream, self.broken, self.trace, conditions, ranks, self.sharding)
        self.micro_batches = self.stream.micro_batches_of(self.worker.rank, self.worker.world_size)
        self.captures = config.cuda_graph and self.on_gpu
        self.differentiated: list[ForwardBackward] = []
        self.inferences: list[tuple[ValidationForward, str]] = []
        self.watch: LossWatch = session.loss_watch(
            self.worker,
            self.precision,
            micro_batches=self.stream.micro_batches_per_step,
            reaction=config.on_bad_loss,
        )


class Step:
    """One step of training, on one global batch. `TrainingRun.steps` yields it for a loop like this.

        for batch in step:
            step.backward(differentiated, batch["images"], batch["labels"])
        step.update(optimizer)

    Attributes:
        index: number of the step in the run.
        progress: share of the run's samples that are consumed in the middle of the step, 0..1, for learning rates.
        ends_epoch: whether the step is the last one of an epoch that is validated; see `--validate-every`.
        is_warm_up: whether the step trains on a resident batch and is undone afterwards.
        learning_rate: the learning rate of the update.
    """

    def __init__(
        self,
        run: RunParts,
        batches: Iterator[Batch],
        meter: EpochMeter,
        index: int = 0,
        on_update: Callable[[list[MicroBatch]], None] | None = None,
        *,
        counts_flops: bool = False,
    ) -> None:
        self._run, self._batches, self._meter, self._on_update = run, batches, meter, on_update
        self.index, self.progress, self.ends_epoch, self.is_warm_up = index, 0.0, False, on_update is None
        self.learning_rate, self._counts_flops = 0.0, counts_flops
        self._allreduce = run.differentiated[-1].allreduce if run.differentiated else None
        self._pending: Batch | None = None
        self._trained: list[MicroBatch] = []
        self._updated = False
        if not self.is_warm_up:
            stream = run.stream
            self.progress = (index + 0.5) * stream.global_batch_size / (stream.epochs * stream.samples)
            closed = stream.epoch_closed_by(index)
            self.ends_epoch = closed is not None and run.config.validates(closed)
            run.worker.counts.begin_step(run.worker.world_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches. Torch's random numbers are seeded before each of them.

        Raises:
            UsageError: the loop did not call `backward` for the previous micro-batch.
        """
        run, meter, allreduce = self._run, self._meter, self._allreduce
        if allreduce is not None:
            allreduce.sample(meter)
        while (index := len(self._trained)) < run.micro_batches:
            meter.enter("loader_wait")
            batch = next(self._batches)
            meter.first_batch()
            meter.enter("step")
            if index == 0 and not self.is_warm_up:
                run.watch.begin_step(self.index, run.state.parts.values(), meter.loss_sum)
            if allreduce is not None:
                allreduce.expect(meter if index == run.micro_batches - 1 else None)
            if run.micro_batches > 1:
                run.state.statistics.begin_micro_batch(index)
            _seed(int(keyed(run.config.seed, batch.micro_batch.number)) >> 1, run.worker.device)
            self._pending = batch
            yield batch
            require(self._pending is None, f"in step {self.index} micro-batch {index} was not given to `step.backward`")

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
        batch, index, run = self._pending, len(self._trained), self._run
        here = f"in step {self.index}"
        require(
            batch is not None,
            f"{here} `step.backward` was called twice for a micro-batch, or outside of `for batch in step`",
        )
        assert batch is not None
        if self._counts_flops:
            self._counts_flops = False
            run.state.flops_per_image = differentiated.flops_per_image(*inputs)
        loss: torch.Tensor | None = None
        with suppress(torch.OutOfMemoryError):  # the error, which is gone when its block ends, holds what was computed
            loss = differentiated(*inputs, last=index == run.micro_batches - 1)
        if loss is None:
            fits = differentiated.largest_that_fits(*inputs)
            instead = f"about {fits} would fit" if fits else "no smaller one was found that fits"
            instead = instead if run.sharding is None else "give a smaller one"
            others = [] if run.config.activation_checkpointing else ["--activation-checkpointing"]
            if run.config.shard is not None:
                others.append("more workers, which have smaller shards")
            elif run.worker.world_size > 1:
                others.append("--shard")
            hint = f", or try {' or '.join(others)}" if others else ""
            raise UsageError(f"--batch-size {run.config.batch_size} {OUT_OF_MEMORY}: {instead}{hint}")
        if run.micro_batches > 1:
            run.state.statistics.end_micro_batch(index)
        if not self.is_warm_up:
            run.watch.after_backward(loss, batch, differentiated, inputs)
        self._meter.add(loss, len(batch.ids))
        self._trained.append(batch.micro_batch)
        self._pending = None
        return loss

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
        run = self._run
        untrained = run.micro_batches - len(self._trained)
        here = f"in step {self.index}"
        require(untrained <= 0, f"{here} {untrained} of its {run.micro_batches} micro-batches were not trained on")
        require(not self._updated, f"{here} `step.update` was called twice")
        self.learning_rate = optimizer.param_groups[0]["lr"]
        if self.is_warm_up:
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # the weights do not change, so losses remain finite
        if run.state.snapshots.copied is not None:
            run.state.snapshots.before_update()
        self._updated = True
        scaler, parameters = run.precision.scaler, [*run.state.model.parameters()]
        scaler.unscale_(optimizer)
        several = True if run.sharding is not None and run.on_gpu else None  # one by one, sharded ones are slow
        norm: torch.Tensor | None = None
        if max_norm is not None or run.watch.needs_norm:  # it takes the host up to a millisecond
            gradients = [each.grad for each in parameters if each.grad is not None]
            norm = nn.utils.get_total_norm(gradients, foreach=several)
            if is_sharded(norm):
                norm = norm.full_tensor()
                run.worker.broadcast([norm])  # copies that sum it in other orders would drift apart
        if not self.is_warm_up:
            run.watch.before_update(norm)
        if max_norm is not None:
            assert norm is not None
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=several)
        scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update_parameters(run.state.model)
        if not self.is_warm_up:
            run.watch.after_update()
        optimizer.zero_grad(set_to_none=True)
        self._meter.enter("loop")
        if self._on_update is not None:
            run.worker.counts.end_step()
            self._on_update(self._trained)

    def check_end(self) -> None:
        """Raise a UsageError unless `update` was called."""
        require(self._updated, f"in step {self.index} `step.update` was not called")


def require(holds: object, otherwise: str) -> None:
    """Raise a UsageError about the job's loop unless a condition holds."""
    if not holds:
        raise UsageError(f"the training loop is wrong: {otherwise}; see docs/own-data.md for the loop")


def _seed(seed: int, device: torch.device) -> None:
    """Seed the random numbers on the host and on this device; `torch.manual_seed` takes longer for all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
