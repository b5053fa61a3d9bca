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
                with run.validation():
                    metrics = evaluate(model, val_loader)
                run.close_epoch(metrics, score="top1", weights=model)

An omitted or misplaced call ends the run with an error that names the call.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.loading.make import make_loader
from raydali.data.sources.source import TrainAndVal
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import UsageError
from raydali.extras import default_loader
from raydali.host import start_clock
from raydali.host.hardware import OVERLAP_PAYS
from raydali.launch.channel import Interrupted
from raydali.launch.options import TrainingOptions
from raydali.launch.shared_options import WeightsOptions
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.checkpointing import RunState, Stateful
from raydali.launch.worker.missing_samples import check_samples
from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_ceiling import ceiling_conditions
from raydali.launch.worker.run_progress import RunProgress
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step, StepContext
from raydali.launch.worker.stop_signal import StopSignals
from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.measure.flops import peak_flops
from raydali.run.events import Left, Notice
from raydali.run.model_file import BestWeights
from raydali.run.sample_trace import SampleTrace
from raydali.train.batchnorm import RunningStatistics, with_sync_batchnorm
from raydali.train.evaluation.forward import ValidationForward
from raydali.train.finetuning import freeze
from raydali.train.precision import Precision
from raydali.train.step import ForwardBackward

Pipelines = tuple[Pipeline[Any], Pipeline[Any]]


class Closed(NamedTuple):
    """An epoch that the job has closed: its record on rank 0, and the best weights if they are new."""

    record: dict[str, Any] | None
    best: BestWeights | None


class TrainingRun:
    """A training run, on one worker. All ranks must call the same methods in the same order.

    The constructor seeds torch's random numbers equally on every rank: build the model afterwards.

    Args:
        config: the job's options.
        session: the session that the launcher passes to the training function.
        samples: number of training samples.
        labels: labels of the training set, int64 (N,), if each sample has one.

    Attributes:
        worker, stream: this worker, and the run's stream of ids.
        precision: the mixed precision of the forward and backward pass.
    """

    def __init__(
        self, config: TrainingOptions, session: Session, *, samples: int, labels: NDArray[np.int64] | None = None
    ) -> None:
        self._config, self._session = config, session
        self.worker, self.stream = session.worker, config.stream(samples)
        self.precision = Precision(config.precision, self.worker.device)
        self._micro_batches = self.stream.micro_batches_of(self.worker.rank, self.worker.world_size)
        self._overlaps = self.worker.world_size == 1 or self.worker.device.type in OVERLAP_PAYS
        self._broken = BrokenSamples(config, session, samples=samples)
        self._stop_signals = StopSignals(self.worker, session.notice)
        trace = SampleTrace(session.folder, self.worker.rank) if config.trace_samples else None
        self._state = RunState(session, self.stream, self._broken, trace, ceiling_conditions(config, self.worker))
        self._progress = RunProgress(
            config,
            session,
            self.stream,
            self._state,
            self._broken,
            trace,
            labels,
            peak_flops=peak_flops(self.worker.device, self.precision.dtype),
        )
        self._cursor = session.cursor
        session.steps_left = self.stream.steps - self._cursor.start
        self._parts: dict[str, Stateful] = {}
        self._differentiated: list[ForwardBackward] = []
        self._inferences: list[tuple[ValidationForward, str]] = []
        self._val_loader: Loader
        self._context: StepContext
        self._validation_seconds: float | None = None
        self._newest: Step | None = None
        self._closed: Closed | None = None
        torch.manual_seed(config.seed)
        torch.backends.cudnn.benchmark = True

    @property
    def _on_gpu(self) -> bool:
        return self.worker.device.type == "cuda"

    # Calls before the training loop.

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return a new model on the device, with the weights of `--weights`, and with what `--freeze` names frozen."""
        weights = None if self._state.is_resumed else self._session.starting_weights()
        if weights is not None:
            weights.load(model)
        if isinstance(self._config, WeightsOptions) and self._config.freeze is not None:
            freeze(model, self._config.freeze)
        return model.to(self.worker.device)

    def synchronized(self, model: nn.Module) -> nn.Module:
        """Return the model with SyncBatchNorm in place of BatchNorm, if `--sync-bn` asks for it."""
        return with_sync_batchnorm(model, self.worker.gradients) if self._config.sync_bn else model

    def register_state(self, *, model: nn.Module, optimizer: Optimizer, **others: Stateful | None) -> None:
        """Load the model, the optimizer and others from the newest checkpoint, if any, and save them in later ones.

        Args:
            model: the model; its BatchNorm statistics are saved independently of the number of workers.
            optimizer: the optimizer; only its momenta are loaded, its settings stay.
            others: other objects by their names in checkpoints, such as the moving average `ema`; None is ignored.
        """
        parts = {"model": model, "optimizer": optimizer, "scaler": self.precision.scaler, **others}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        statistics = RunningStatistics(
            model,
            micro_batches=self._micro_batches,
            all_micro_batches=self.stream.micro_batches_per_step,
            each_step=not self._overlaps,
        )
        self._context = StepContext(
            self._micro_batches, self._config.seed, model, statistics, self.precision, self._state.before_update
        )
        self._state.keep(self._parts, lambda: statistics.average(self.worker))
        start_clock.mark("model")

    def differentiated(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> ForwardBackward:
        """Return the loss function for `step.backward`, compiled and captured in a CUDA graph if the options say so.

        Args:
            model: the module with all parameters that the loss depends on.
            loss: computes the mean loss of a micro-batch from its tensors by calling the model.

        Raises:
            UsageError: the state is not registered yet.
        """
        self._require(self._parts, "call `run.register_state` before `run.differentiated`")
        differentiated = ForwardBackward(
            model,
            loss,
            self.worker,
            self.precision,
            micro_batches=self.stream.micro_batches_per_step,
            compiled=self._config.compile,
            fused=self._config.fused,
            graph=self._can_capture,
            overlap=self._overlaps,
        )
        if self.worker.world_size > 1 and self._overlaps:
            self._context.allreduce = AllReduceTimer(model)
        self._differentiated.append(differentiated)
        return differentiated

    def inference(self, model: nn.Module, *, inputs: str = "images") -> nn.Module:
        """Return the model for the validation, compiled and captured in a CUDA graph if the options say so.

        Weights and statistics are those of the model at each call.

        Args:
            model: see `ValidationForward`; without DDP.
            inputs: name of the tensor of a validation batch that the model takes.
        """
        captures = self._config.cuda_graph and self._on_gpu
        inference = ValidationForward(model, self.precision, compiled=self._config.compile, graph=captures)
        self._inferences.append((inference, inputs))
        return inference

    def _warm_up_inference(self) -> None:
        faster = [(inference, inputs) for inference, inputs in self._inferences if inference.is_faster]
        if faster:
            loader = self._val_loader
            batch = loader.resident_batch(min(self._config.batch_size, loader.order.samples))
            for inference, inputs in faster:
                inference.warm_up(batch[inputs])
            start_clock.mark("validation")

    @property
    def _can_capture(self) -> bool:
        """True if a step can be one CUDA graph: on a GPU, with one micro-batch per worker, without SyncBatchNorm."""
        config = self._config
        one_micro_batch = self.stream.micro_batches_per_step == self.worker.world_size
        return config.cuda_graph and self._on_gpu and one_micro_batch and not config.sync_bn

    @contextmanager
    def loaders(
        self, data: TrainAndVal[Any], pipelines: Pipelines, *, make: Callable[..., Loader] = make_loader
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
            quarantine=self._broken.of,
        )
        (train, val), name = pipelines, self._config.loader or default_loader()
        in_order = OrderedPass(samples=len(data.val), batch_size=self._config.batch_size)
        with (
            make(name, data.train, train, self.stream, start=self._cursor.start, **options) as loader,
            make(name, data.val, val, in_order, **options) as val_loader,
        ):
            self._val_loader = val_loader
            yield loader, val_loader

    # The training loop.

    def steps(self, loader: Loader) -> Iterator[Step]:
        """Yield the remaining steps of the run, after warm-up steps.

        Warm-up steps train on one batch that stays on the device, in order to compile, to capture a CUDA graph and to
        measure the ceiling; then they are undone. Between two steps a checkpoint is saved if one is due, and the run
        ends if this was requested.

        Args:
            loader: the loader of the training set, made by `loaders`.

        Raises:
            UsageError: the loop omitted a call.
            NodeError: see `check_samples`.
        """
        self._require(self._parts, "call `run.register_state` before `run.steps`")
        is_ours = loader.order is self.stream and loader.start == self._cursor.start
        self._require(is_ours, "take the training loader from `run.loaders`")
        check_samples(loader, self.worker)
        rehearsal = Rehearsal(
            self._session,
            self._config,
            self._state,
            loader,
            self._context,
            self._progress,
            self._parts,
            self._differentiated,
            self._warm_up_inference,
            captures=self._can_capture,
        )
        yield from rehearsal.before_first_step()
        self._state.discard_checkpoint()
        # Freeze the objects that imports and compilers have created: to collect among them takes longer than a step.
        gc.collect()
        gc.freeze()
        progress, cursor, every = self._progress, self._cursor, self._config.checkpoint_every
        progress.begin(loader)
        self._load_validation_ahead()
        trace, batches = progress.step_trace(), _marked(loader.by_step())
        for index in range(self._cursor.start, self.stream.steps):
            trace.before(index)
            self._newest = Step(
                self._context,
                batches,
                progress.meter,
                index=index,
                progress=(index + 0.5) * self.stream.global_batch_size / (self._config.epochs * self.stream.samples),
                ends_epoch=self.stream.epoch_closed_by(index) is not None,
                on_update=progress.finish_step,
            )
            yield self._newest
            self._newest.check_end()
            if self._newest.ends_epoch:
                yield from self._finish_epoch(rehearsal)
            trace.after(index)
            if every and cursor.done % every == 0 and cursor.saved < cursor.done:
                self._checkpoint()
            if notice := self._stop_signals.poll():
                self._leave(notice)
            self._session.steps_left = self.stream.steps - cursor.done
        rehearsal.finish()

    # The end of an epoch.

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Prepare the weights for the validation inside this context; its time does not reduce the training rate.

        BatchNorm's statistics are averaged over ranks, and copied to the moving average.
        """
        began = time.perf_counter()
        with self._progress.meter.stage("validation"):
            self._context.statistics.average(self.worker)
            for part in self._parts.values():
                if isinstance(part, AveragedModel):
                    for averaged, current in zip(part.module.buffers(), self._context.model.buffers(), strict=True):
                        averaged.copy_(current)
            yield
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
        if self._newest is not None:
            self._newest.check_end()
        is_open = self._newest is not None and self._newest.ends_epoch and self._closed is None
        self._require(is_open, "call `run.close_epoch` once, only where `step.ends_epoch`")
        seconds, self._validation_seconds = self._validation_seconds, None
        self._require(seconds is not None, "validate inside `with run.validation():` before `run.close_epoch`")
        self._require(score in metrics, f"score={score!r} must be one of the metrics {', '.join(metrics)}")
        record = self._progress.end_epoch(
            {**metrics, "seconds": seconds}, self._context.learning_rate, self._context.flops_per_image
        )
        epoch = self.stream.epoch_closed_by(self._cursor.done - 1) or 0
        best = self._state.best_of(metrics[score], weights, metric=score, epoch=epoch)
        self._closed = Closed(record, best)

    def _finish_epoch(self, rehearsal: Rehearsal) -> Iterator[Step]:
        """Rehearse the next image size, or measure a wrong ceiling again; then save the epoch's checkpoint."""
        closed, self._closed = self._closed, None
        if closed is None:
            raise self._error(
                f"`run.close_epoch` was not called at the end of an epoch, in step {self._cursor.done - 1}"
            )
        yield from rehearsal.after_epoch(closed.record)
        self._progress.begin_epoch()
        self._checkpoint(closed.best)
        self._load_validation_ahead()

    def _load_validation_ahead(self) -> None:
        """Load the first batches of the next validation while training runs; a CPU has no time for it."""
        if self._on_gpu and self._cursor.done < self.stream.steps:
            self._val_loader.begin_ahead()

    def _checkpoint(self, best: BestWeights | None = None) -> None:
        with self._progress.meter.stage("checkpoint"):
            self._state.save(self._progress.meter.record, best)

    def _leave(self, notice: Notice) -> None:
        """Save a checkpoint of all completed steps, and then leave."""
        if self._cursor.saved < self._cursor.done:
            self._checkpoint()
        self._session.finish()
        if self.worker.rank == 0:
            self._session.emit(Left(notice=notice, step=self._cursor.done))
        self.worker.barrier()
        raise Interrupted(notice)

    def _require(self, holds: object, otherwise: str) -> None:
        if not holds:
            raise self._error(otherwise)

    def _error(self, text: str) -> UsageError:
        return UsageError(f"the training loop is wrong: {text}; see docs/own-data.md for the loop")


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; the time until the first one is a phase of the start."""
    for first in batches:
        start_clock.mark("first batch")
        yield first
        break
    yield from batches
