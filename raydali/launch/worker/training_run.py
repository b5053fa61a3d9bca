"""The interface of a job's training loop to its run: it yields the steps, measures, saves and reports.

    run = TrainingRun(config, session, samples=len(data.train))
    run.register_state(model=model, optimizer=optimizer)
    differentiated = run.differentiated(model, lambda images, labels: criterion(model(images), labels))
    with run.loaders(data, (train_pipeline, val_pipeline)) as (loader, val_loader):
        for step in run.steps(loader):
            for batch in step:
                step.backward(differentiated, batch["images"], batch["labels"])
            step.update(optimizer)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, network, val)
                run.close_epoch(metrics, score="top1", weights=model)

An omitted or misplaced call ends the run with an error that names the call.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.index.source import TrainAndVal
from raydali.data.load.loader import Batch, Loader, LoaderOptions
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import MicroBatch, OrderedPass
from raydali.data.tasks.pipeline import Pipeline
from raydali.extras import default_loader
from raydali.host import start_clock
from raydali.launch.channel import Interrupted
from raydali.launch.worker.bad_samples import check_samples
from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_meter import RunMeter
from raydali.launch.worker.run_state import Stateful
from raydali.launch.worker.session import Session
from raydali.launch.worker.short_run import ShortRun, limited
from raydali.launch.worker.step import RunParts, Step, require
from raydali.options.every_job import TrainingOptions
from raydali.options.subjects import StartingWeightsOptions
from raydali.run.early_end import early_end
from raydali.run.events import Left, Notice
from raydali.run.messages import Note
from raydali.run.model_file import BestWeights
from raydali.training.batchnorm import RunningStatistics, with_sync_batchnorm
from raydali.training.blocks import recomputed, repeated_blocks
from raydali.training.evaluation.reference import Reference, ReferenceWatch
from raydali.training.evaluation.validation import ValidationForward, ValidationPass
from raydali.training.finetuning import freeze
from raydali.training.forward_backward import ForwardBackward
from raydali.training.weights.undrawn import undrawn
from raydali.training.worker import NOTICES

EARLY_SAVES = 2
"""Number of checkpoints at the beginning of a short run: the first ones take longer than in a long run."""


class TrainingRun:
    """A training run, on one worker. All ranks must call the same methods in the same order.

    The constructor seeds torch's random numbers equally on every rank: build the model afterwards.

    Args:
        config: the job's options.
        session: the session that the launcher passes to the training function.
        samples: number of training samples.
        labels: labels of the training set, int64 (N,), if each sample has one.
        blocks: returns the blocks of a network, for `--shard` and `--activation-checkpointing`; by default those that
            it repeats. It is called with the model, and with the network of a moving average.

    Attributes:
        worker, stream: this worker, and the run's stream of ids.
        precision: the mixed precision of the forward and backward pass.
    """

    def __init__(
        self,
        config: TrainingOptions,
        session: Session,
        *,
        samples: int,
        labels: NDArray[np.int64] | None = None,
        blocks: Callable[[nn.Module], Iterable[nn.Module]] = repeated_blocks,
    ) -> None:
        self._run = run = RunParts(config, session, samples)
        self.worker, self.stream, self.precision = run.worker, run.stream, run.precision
        self._session, self._cursor, self._state, self._labels = session, session.cursor, run.state, labels
        self._named_blocks = blocks
        session.steps_left = self.stream.steps - self._cursor.start
        self._notice: Notice | None = None
        self._step: Step | None = None
        # What the end of an epoch leaves for its checkpoint.
        self._validation_seconds: float | None = None
        self._pace: dict[str, Any] = {}
        self._record: dict[str, Any] | None = None
        self._best: BestWeights | None = None
        self._reference: Reference | None = None
        # Made by `loaders` and `steps`.
        self._val_loader: Loader
        self._rehearsal: Rehearsal
        self._measured: RunMeter
        self._watch: ReferenceWatch
        self._short: ShortRun | None = None
        torch.manual_seed(config.seed)
        torch.set_default_dtype(self.precision.of_parameters)
        torch.backends.cudnn.benchmark = True

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        blocks = [*self._named_blocks(model)]
        require({*blocks} <= {*model.modules()}, "`blocks` must return modules of the network that it gets")
        return blocks

    def prepared(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        """Return a new model on the device, with the options that concern it.

        It has the weights of `--weights`; what `--freeze` names is frozen; with `--activation-checkpointing` its blocks
        keep no activations. With `--shard` it is on the host: the device may be too small for it.

        Args:
            model: the model, or a function that builds it, which then draws no weights that a checkpoint has, or that
                `--shard` takes from rank 0.
        """
        if not isinstance(model, nn.Module):
            others_count = self._state.is_resumed or (self._run.sharding is not None and self.worker.rank > 0)
            model = undrawn(model) if others_count else model()
        weights = None if self._state.is_resumed else self._session.starting_weights()
        if weights is not None:
            weights.load(model)
        if isinstance(self._run.config, StartingWeightsOptions) and self._run.config.freeze is not None:
            freeze(model, self._run.config.freeze)
        if self._run.config.activation_checkpointing:
            recomputed(model, self._blocks)
        return model if self._run.sharding is not None else model.to(self.worker.device)

    def synchronized(self, model: nn.Module) -> nn.Module:
        """Return the model as the workers train it together.

        It has SyncBatchNorm in place of BatchNorm, if `--sync-bn` asks for it, and is sharded, if `--shard` does: make
        a moving average before, and the optimizer afterwards.
        """
        config, sharding = self._run.config, self._run.sharding
        if config.sync_bn and self.worker.world_size > 1:
            model = with_sync_batchnorm(model, self.worker.gradients, fused=bool(config.compile and config.fused))
        if sharding is not None and not sharding.shard(model, self._blocks):
            one = "the model has no repeated blocks, so --shard gathers the whole model for each step"
            self._session.emit_once(Note(one))
        return model

    def register_state(self, *, model: nn.Module, optimizer: Optimizer, **others: Stateful | None) -> None:
        """Load the model, the optimizer and others from the newest checkpoint, if any, and save them in later ones.

        Args:
            model: the model; its BatchNorm statistics are saved independently of the number of workers.
            optimizer: the optimizer; only its momenta are loaded, its settings stay.
            others: other objects by their names in checkpoints, such as the moving average `ema`; None is ignored.
        """
        if (sharding := self._run.sharding) is not None:
            require(sharding.units(model), "with `--shard`, call `run.synchronized` before `run.register_state`")
            for part in others.values():
                if isinstance(part, AveragedModel):
                    sharding.shard(part.module, self._blocks)
        mine, every = self._run.micro_batches, self.stream.micro_batches_per_step
        statistics = RunningStatistics(model, micro_batches=mine, all_micro_batches=every)
        own: dict[str, Stateful] = {"scaler": self.precision.scaler, "losses": self._run.watch.window}
        parts = {"optimizer": optimizer, **own, **others}
        self._session.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._state.keep(model, statistics, {name: part for name, part in parts.items() if part is not None})
        start_clock.mark("model")

    def differentiated(
        self, model: nn.Module, loss: Callable[..., torch.Tensor], *, parts: Sequence[nn.Module] = ()
    ) -> ForwardBackward:
        """Return the loss function for `step.backward`, compiled and captured in a CUDA graph if the options say so.

        Args:
            model: the module with all parameters that the loss depends on.
            loss: computes the mean loss of a micro-batch from its tensors by calling the model.
            parts: modules to capture one by one, if the shapes of the loss depend on the data; see `GraphedParts`.

        Raises:
            UsageError: the state is not registered yet.
        """
        require(self._state.parts, "call `run.register_state` before `run.differentiated`")
        differentiated = ForwardBackward(
            model,
            loss,
            self.worker,
            self.precision,
            micro_batches=self.stream.micro_batches_per_step,
            compiled=self._run.config.compile,
            fused=self._run.config.fused,
            graph=self._run.captures,
            parts=parts,
            sharding=self._run.sharding,
        )
        self._run.differentiated.append(differentiated)
        start_clock.mark("process group")  # NCCL connects at its first use
        return differentiated

    def inference(self, model: nn.Module, *, inputs: str = "images") -> nn.Module:
        """Return the model for the validation, captured in a CUDA graph and compiled if the options say so.

        It is compiled only if the validations of the run have enough batches to gain from it.

        Each call uses the weights and statistics that the model has then.

        Args:
            model: see `ValidationForward`; without DDP.
            inputs: name of the tensor of a validation batch that the model takes.
        """
        inference = ValidationForward(model, self.precision)
        self._run.inferences.append((inference, inputs))
        return inference

    @contextmanager
    def loaders(
        self,
        data: TrainAndVal[Any],
        pipelines: tuple[Pipeline[Any], Pipeline[Any]],
        *,
        make: Callable[..., Loader] = make_loader,
    ) -> Iterator[tuple[Loader, Loader]]:
        """Make the loaders of the training and the validation set, and close them at the end of the context.

        Args:
            data: the sources of both sets.
            pipelines: the pipelines of training samples and of validation samples.
            make: a function with the signature of `make_loader`.
        """
        options = LoaderOptions(
            rank=self.worker.rank,
            world_size=self.worker.world_size,
            device=self.worker.device,
            threads=self.worker.cpus,
            quarantine=self._run.broken.of,
        )
        (train, val), name = pipelines, self._run.config.loader or default_loader()
        in_order = OrderedPass(samples=len(data.val), batch_size=self._run.config.batch_size)
        with (
            make(name, data.train, train, self.stream, start=self._cursor.start, **options) as loader,
            make(name, data.val, val, in_order, **options) as val_loader,
        ):
            self._val_loader = val_loader
            self._session.validation_samples, self._session.validates = len(data.val), self._run.config.validates
            self._session.most_epochs = self._run.config.most_epochs
            yield loader, val_loader
        self._run.broken.finish()

    def steps(self, loader: Loader) -> Iterator[Step]:
        """Yield the remaining steps of the run, after warm-up steps.

        Warm-up steps train on one batch that stays on the device, in order to compile, to capture a CUDA graph and to
        measure the ceiling; then they are undone. Between two steps a checkpoint is saved if one is due, and the run
        ends if this was requested, or after an epoch by `--patience` or `--stop-after`.

        Args:
            loader: the loader of the training set, made by `loaders`.

        Raises:
            UsageError: the loop omitted a call.
            NodeError: see `check_samples`.
        """
        require(self._state.parts, "call `run.register_state` before `run.steps`")
        config, session, cursor, stream = self._run.config, self._session, self._cursor, self.stream
        require(loader.order is stream and loader.start == cursor.start, "take the training loader from `run.loaders`")
        if self._ends_early():  # workers that failed after the last epoch's checkpoint, or a resume
            return
        check_samples(loader, self.worker)
        self._watch = ReferenceWatch(self._val_loader)
        self._rehearsal = rehearsal = Rehearsal(self._run, loader, self._val_loader)
        yield from rehearsal.before_first_step()
        # Freeze the objects that imports and compilers have created: to collect among them takes longer than a step.
        gc.collect()
        gc.freeze()
        self._measured = RunMeter(self._run, loader, self._labels)
        self._short = None if session.short_seconds is None else ShortRun(session.short_seconds)
        batches, profiler = _marked(iter(loader)), self._measured.profiler
        for index in range(cursor.start, stream.steps):
            if profiler is not None:
                profiler.before(index)
            self._step = step = Step(self._run, batches, self._measured.meter, index, self._finish_step)
            step.ends_epoch = step.ends_epoch or (self._short is not None and self._short.closes)
            yield step  # the job trains; at the end of an epoch it also validates, and calls `close_epoch`
            step.check_end()
            if closes := step.ends_epoch or stream.epoch_closed_by(index) is not None:
                yield from rehearsal.after_epoch(self._record_of_epoch(step))
                if self._short is not None:
                    self._wait_for_checkpoint()  # epochs of the whole run may be longer than writing one
                self._measured.begin_epoch()
                self._checkpoint()
                if self._run.on_gpu and cursor.done < stream.steps and config.validates(self._epoch_after(index) + 1):
                    self._val_loader.begin_ahead()  # for the next validation; a CPU has no time for it
            if profiler is not None:
                profiler.after(index)
            is_due = config.checkpoint_every and cursor.done % config.checkpoint_every == 0
            is_early = self._short is not None and index < cursor.start + EARLY_SAVES
            if (is_due or is_early) and cursor.saved < cursor.done:
                self._checkpoint(waits=not is_due)
            if self._short is not None and self._short.ends_after_step():
                session.steps_left = 0
                break
            if closes and self._ends_early():
                break
            if notice := self._notice_of_any_rank():
                self._leave(notice)
            session.steps_left = stream.steps - cursor.done
        rehearsal.cache.finish()

    def _finish_step(self, micro_batches: list[MicroBatch]) -> None:
        """Count a step, record its samples, and report the progress to the driver.

        Raises:
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks at the same step.
        """
        cursor, meter = self._cursor, self._measured.meter
        for micro_batch in micro_batches:
            meter.replaced += micro_batch.replaced
            if self._run.trace is not None:
                self._run.trace.add(micro_batch)
        cursor.done += 1
        meter.end_step()
        self._measured.judge()
        self._run.broken.after_step(cursor.done)
        if cursor.done == cursor.start + 1:
            start_clock.mark("first step")
            self._session.report_start(steps=self.stream.steps)
        self._session.report_progress(self.stream)
        self._measured.live.step()

    def _ends_early(self) -> bool:
        """Return whether the run ends after the epochs so far, the same on all ranks, and tell the session why."""
        config, session, state = self._run.config, self._session, self._state
        limits = {"patience": config.patience, "stop_after": config.stop_after}
        if any(limits.values()) and self._cursor.done < self.stream.steps:
            session.early_end = self.worker.from_first(early_end(state.epochs, state.metric, **limits))
        if session.early_end is None:
            return False
        session.steps_left = 0
        return True

    def _notice_of_any_rank(self) -> Notice | None:
        """Return the notice that any rank had at the previous step, the same on all ranks; None if there was none.

        A notice reaches ranks at different times, but all ranks know at the same step how many have one, see
        StepCounts. So no rank waits, and all ranks leave at the same step.
        """
        counts = self.worker.counts
        if counts.sums[NOTICES]:
            notices: list[Notice | None] = self.worker.exchange(self._notice)
            notice: Notice = next(filter(None, notices))
            if notice != "short":
                return notice
            if self._short is not None:
                self._short.close_next()
        is_over = self._short is not None and self._short.is_due
        self._notice = self._session.notice() or ("short" if is_over else None)
        counts.mine[NOTICES] = int(self._notice is not None)
        return None

    def _checkpoint(self, *, waits: bool = False) -> None:
        """Save a checkpoint, at the end of an epoch with what its validation left, and wait until it is written."""
        with self._measured.meter.stage("checkpoint"):
            self._state.save(self._measured.record, self._best, self._reference)
            if waits:
                self._wait_for_checkpoint()
        self._record = self._best = self._reference = None

    def _wait_for_checkpoint(self) -> None:
        """Wait on all ranks until the newest checkpoint is written."""
        self._session.checkpoints.wait()
        self.worker.barrier()

    def _leave(self, notice: Notice) -> None:
        """Save a checkpoint of all completed steps, and then leave."""
        if self._cursor.saved < self._cursor.done:
            self._checkpoint()
        self._session.checkpoints.finish()
        self._session.emit_once(Left(notice=notice, step=self._cursor.done))
        self.worker.barrier()
        raise Interrupted(notice)

    def _record_of_epoch(self, step: Step) -> dict[str, Any]:
        """Return the record of the epoch that this step ends; `close_epoch` has made it if the epoch is validated."""
        if not step.ends_epoch:
            self._record = self._measured.end_epoch(self._epoch_after(step.index), step.learning_rate, None)
        require(self._record, f"`run.close_epoch` was not called at the end of an epoch, in step {step.index}")
        assert self._record is not None
        return self._record

    def _epoch_after(self, step: int) -> int:
        """Return the epoch that is closed after this step, which a short run may do early."""
        closed = self.stream.epoch_closed_by(step)
        return self.stream.epoch_of(step) if closed is None else closed

    @contextmanager
    def validation(self) -> Iterator[ValidationPass]:
        """Prepare the weights for the validation inside this context; its time does not reduce the training rate.

        It yields what the job's evaluation takes. BatchNorm's statistics are averaged over ranks, and copied to the
        moving average.
        """
        require(self._step is not None, "call `run.validation` only where `step.ends_epoch`")
        with self._measured.meter.stage("validation"):
            self._rehearsal.warm_up_inference()
            began = time.perf_counter()
            self._state.statistics.average(self.worker)
            for part in self._state.parts.values():
                if isinstance(part, AveragedModel):
                    for averaged, current in zip(part.module.buffers(), self._state.model.buffers(), strict=True):
                        averaged.copy_(current)
            sharding = self._run.sharding
            with sharding.whole() if sharding is not None else nullcontext():
                with self._watch.watching() as loader, limited(loader, self._session.short_seconds) as self._pace:
                    yield ValidationPass(loader, loader.source, self.worker, self.precision)
                is_exact = sharding is None or self.precision.dtype.itemsize > 2  # else weights are gathered in 16 bits
                self._reference = self._watch.take() if self.worker.rank == 0 and is_exact else None
        self._validation_seconds = time.perf_counter() - began

    def close_epoch(self, metrics: Mapping[str, Any], *, score: str, weights: nn.Module) -> None:
        """Write the epoch's record and a checkpoint; also save the weights in `best/` if the score is the highest.

        Args:
            metrics: results of the validation.
            score: name of the metric by which the best weights are chosen; higher is better.
            weights: the model, or its moving average.

        Raises:
            UsageError: no epoch ends at this step, the epoch is already closed, or there was no validation.
        """
        step = self._step
        if step is not None:
            step.check_end()
        is_open = step is not None and step.ends_epoch and self._record is None
        require(is_open, "call `run.close_epoch` once, only where `step.ends_epoch`")
        assert step is not None
        seconds, self._validation_seconds = self._validation_seconds, None
        require(seconds is not None, "validate inside `with run.validation():` before `run.close_epoch`")
        require(score in metrics, f"score={score!r} must be one of the metrics {', '.join(metrics)}")
        epoch = self._epoch_after(self._cursor.done - 1)
        figures = {**metrics, "seconds": seconds, **self._pace}
        self._record = self._measured.end_epoch(epoch, step.learning_rate, figures)
        self._best = self._state.best_of(metrics[score], weights, metric=score, epoch=epoch, reference=self._reference)


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; the time until the first one is a phase of the start."""
    for first in batches:
        start_clock.mark("first batch")
        yield first
        break
    yield from batches
