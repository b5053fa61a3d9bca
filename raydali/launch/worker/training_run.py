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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.loading.make import make_loader
from raydali.data.sources.source import TrainAndVal
from raydali.data.stream.class_mixing import useful_block
from raydali.data.stream.stream import MicroBatch, OrderedPass
from raydali.data.tasks.pipeline import Pipeline
from raydali.extras import default_loader
from raydali.host import start_clock
from raydali.launch.channel import Interrupted
from raydali.launch.options import TrainingOptions
from raydali.launch.shared_options import WeightsOptions
from raydali.launch.worker.bad_samples import BrokenSamples, check_samples
from raydali.launch.worker.checkpointing import RunState, Stateful
from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_ceiling import ceiling_conditions
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import RunParts, Step, loop_error
from raydali.measure.flops import peak_flops
from raydali.measure.meter import EpochMeter, LiveMetrics
from raydali.measure.records import epoch_record
from raydali.run.events import Left, Notice
from raydali.run.messages import EpochEnded
from raydali.run.model_file import BestWeights
from raydali.run.sample_trace import SampleTrace
from raydali.train.evaluation.reference import Reference, ReferenceWatch
from raydali.train.evaluation.validation import ValidationForward, ValidationPass
from raydali.train.finetuning import freeze
from raydali.train.profiling import StepTrace
from raydali.train.step import ForwardBackward, Precision, RunningStatistics, with_sync_batchnorm
from raydali.train.worker import NOTICES

Pipelines = tuple[Pipeline[Any], Pipeline[Any]]


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
        self._config, self._session, self._cursor = config, session, session.cursor
        self.worker, self.stream = session.worker, config.stream(samples)
        self.precision = Precision(config.precision, self.worker.device)
        self._broken = BrokenSamples(config, session, samples=samples)
        self._trace = SampleTrace(session.folder, self.worker.rank) if config.trace_samples else None
        conditions = ceiling_conditions(config, self.worker)
        self._state = RunState(session, self.stream, self._broken, self._trace, conditions)
        self._on_gpu = self.worker.device.type == "cuda"
        one_micro_batch = self.stream.micro_batches_per_step == self.worker.world_size
        self._parts = RunParts(
            config,
            session,
            self.stream,
            self.precision,
            self._state,
            micro_batches=self.stream.micro_batches_of(self.worker.rank, self.worker.world_size),
            captures=config.cuda_graph and self._on_gpu and one_micro_batch and not config.sync_bn,
        )
        self._useful_block = cache(lambda: useful_block(labels, self.stream))
        session.steps_left = self.stream.steps - self._cursor.start
        self._notice: Notice | None = None
        self._step: Step | None = None
        # Of the epoch that ends: what its validation and `close_epoch` leave for its checkpoint.
        self._validation_seconds: float | None = None
        self._record: dict[str, Any] | None = None
        self._best: BestWeights | None = None
        self._reference: Reference | None = None
        # Made by `loaders` and `steps`.
        self._val_loader: Loader
        self._rehearsal: Rehearsal
        self._meter: EpochMeter
        self._live_metrics: LiveMetrics
        self._watch: ReferenceWatch
        torch.manual_seed(config.seed)
        torch.set_default_dtype(self.precision.of_parameters)
        torch.backends.cudnn.benchmark = True

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
        run = self._parts
        run.model, run.statistics = (
            model,
            RunningStatistics(
                model, micro_batches=run.micro_batches, all_micro_batches=self.stream.micro_batches_per_step
            ),
        )
        parts = {"model": model, "optimizer": optimizer, "scaler": self.precision.scaler, **others}
        kept = {name: part for name, part in parts.items() if part is not None}
        self._state.keep(kept, lambda: run.statistics.average(self.worker))
        start_clock.mark("model")

    def differentiated(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> ForwardBackward:
        """Return the loss function for `step.backward`, compiled and captured in a CUDA graph if the options say so.

        Args:
            model: the module with all parameters that the loss depends on.
            loss: computes the mean loss of a micro-batch from its tensors by calling the model.

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
            compiled=self._config.compile,
            fused=self._config.fused,
            graph=self._parts.captures,
        )
        self._parts.allreduce = differentiated.allreduce
        self._parts.differentiated.append(differentiated)
        start_clock.mark("process group")  # NCCL connects at its first use
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
        self._parts.inferences.append((inference, inputs))
        return inference

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
        self._broken.finish()

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
        require(self._state.parts, "call `run.register_state` before `run.steps`")
        config, session, cursor, stream = self._config, self._session, self._cursor, self.stream
        is_ours = loader.order is stream and loader.start == cursor.start
        require(is_ours, "take the training loader from `run.loaders`")
        check_samples(loader, self.worker)
        self._rehearsal = rehearsal = Rehearsal(self._parts, loader, self._val_loader)
        self._watch = ReferenceWatch(self._val_loader)
        yield from rehearsal.before_first_step()
        self._state.discard_checkpoint()
        # Freeze the objects that imports and compilers have created: to collect among them takes longer than a step.
        gc.collect()
        gc.freeze()
        self._begin_to_measure(loader)
        batches, profiler = _marked(iter(loader)), self._profiler()
        for index in range(cursor.start, stream.steps):
            if profiler is not None:
                profiler.before(index)
            self._step = step = Step(
                self._parts,
                batches,
                self._meter,
                index=index,
                progress=(index + 0.5) * stream.global_batch_size / (config.epochs * stream.samples),
                ends_epoch=stream.epoch_closed_by(index) is not None,
                on_update=self._finish_step,
            )
            yield step
            step.check_end()
            if step.ends_epoch:
                yield from self._finish_epoch()
                if self._on_gpu and cursor.done < stream.steps:
                    self._val_loader.begin_ahead()  # for the next validation; a CPU has no time for it
            if profiler is not None:
                profiler.after(index)
            if config.checkpoint_every and cursor.done % config.checkpoint_every == 0 and cursor.saved < cursor.done:
                self._checkpoint()
            if notice := self._notice_of_any_rank():
                self._leave(notice)
            session.steps_left = stream.steps - cursor.done
        rehearsal.finish()

    def _begin_to_measure(self, loader: Loader) -> None:
        worker = self.worker
        self._meter = EpochMeter(
            worker.device,
            rank=worker.rank,
            world_size=worker.world_size,
            node=worker.node,
            loader=loader,
            peak_flops=peak_flops(worker.device, self.precision.dtype),
        )
        self._meter.enter("loop")
        self._live_metrics = LiveMetrics(
            self._meter,
            batch_size=self._config.batch_size,
            micro_batches=self._parts.micro_batches,
            publish=self._session.publish,
        )
        self._live_metrics.ceiling_images_per_second = self._ceiling_of_rank

    @property
    def _ceiling_of_rank(self) -> float | None:
        share = self._parts.micro_batches / self.stream.micro_batches_per_step
        return self._state.ceiling * share if self._state.ceiling else None

    def _profiler(self) -> StepTrace | None:
        """Return the profiler of the steps that `--profile-steps` names; None if none of them is left."""
        asked = self._config.profiled
        if asked is None:
            return None
        steps = range(max(asked.start, self._cursor.done), min(asked.stop, self.stream.steps))
        if not steps:
            left = f"{self._cursor.done} to {self.stream.steps - 1}"
            if self.worker.rank == 0:
                text = f"--profile-steps {self._config.profile_steps} traces nothing: only steps {left} remain"
                self._session.warn(text)
            return None
        profiler = StepTrace(steps, self.worker.rank, self.worker.device, self._session.folder.write)
        self._meter.on_stage = profiler.stage
        return profiler

    def _finish_step(self, micro_batches: list[MicroBatch]) -> None:
        """Count a step, record its samples, and report the progress to the driver.

        Raises:
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks at the same step.
        """
        cursor = self._cursor
        for micro_batch in micro_batches:
            self._meter.replaced += micro_batch.replaced
            if self._trace is not None:
                self._trace.add(micro_batch)
        cursor.done += 1
        self._meter.end_step()
        self._broken.after_step(cursor.done)
        if cursor.done == cursor.start + 1:
            start_clock.mark("first step")
            self._session.report_start(steps=self.stream.steps)
        self._session.report_progress(self.stream)
        self._live_metrics.step()

    def _notice_of_any_rank(self) -> Notice | None:
        """Return the notice that any rank had at the previous step, the same on all ranks; None if there was none.

        A notice reaches ranks at different times, but all ranks know at the same step how many have one, see
        StepCounts. So no rank waits, and all ranks leave at the same step.
        """
        counts = self.worker.counts
        if counts.sums[NOTICES]:
            notices: list[Notice | None] = self.worker.exchange(self._notice)
            return next(filter(None, notices))
        self._notice = self._session.notice()
        counts.mine[NOTICES] = int(self._notice is not None)
        return None

    def _checkpoint(self) -> None:
        with self._meter.stage("checkpoint"):
            self._state.save(self._meter.record, self._best, self._reference)
        self._best = self._reference = None

    def _leave(self, notice: Notice) -> None:
        """Save a checkpoint of all completed steps, and then leave."""
        if self._cursor.saved < self._cursor.done:
            self._checkpoint()
        self._session.checkpoints.finish()
        if self.worker.rank == 0:
            self._session.emit(Left(notice=notice, step=self._cursor.done))
        self.worker.barrier()
        raise Interrupted(notice)

    # The end of an epoch.

    @contextmanager
    def validation(self) -> Iterator[ValidationPass]:
        """Prepare the weights for the validation inside this context; its time does not reduce the training rate.

        It yields what the job's evaluation takes. BatchNorm's statistics are averaged over ranks, and copied to the
        moving average.
        """
        require(self._step is not None, "call `run.validation` only where `step.ends_epoch`")
        with self._meter.stage("validation"):
            self._rehearsal.warm_up_inference()
            began = time.perf_counter()
            self._parts.statistics.average(self.worker)
            for part in self._state.parts.values():
                if isinstance(part, AveragedModel):
                    for averaged, current in zip(part.module.buffers(), self._parts.model.buffers(), strict=True):
                        averaged.copy_(current)
            with self._watch.watching() as loader:
                yield ValidationPass(loader, loader.source, self.worker, self.precision)
            self._reference = self._watch.take() if self.worker.rank == 0 else None
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
        if self._step is not None:
            self._step.check_end()
        is_open = self._step is not None and self._step.ends_epoch and self._record is None
        require(is_open, "call `run.close_epoch` once, only where `step.ends_epoch`")
        seconds, self._validation_seconds = self._validation_seconds, None
        require(seconds is not None, "validate inside `with run.validation():` before `run.close_epoch`")
        require(score in metrics, f"score={score!r} must be one of the metrics {', '.join(metrics)}")
        self._broken.exchange()
        segments = self._state.gather(self._meter.record())
        self._live_metrics.end_epoch()
        done = self._cursor.done
        epoch = self.stream.epoch_closed_by(done - 1) or 0
        self._record = epoch_record(
            segments,
            epoch=epoch,
            step=done,
            samples_consumed=self.stream.state(done)["samples_consumed"],
            learning_rate=self._parts.learning_rate,
            validation={**metrics, "seconds": seconds, "broken": self._broken.in_validation()},
            quarantined=sum(each.replaced for segment in segments for each in segment),
            ceiling_images_per_second=self._state.ceiling,
            flops_per_image=self._state.flops_per_image,
            options=self._config,
            useful_block=self._useful_block,
        )
        self._state.add_epoch(self._record)
        if self.worker.rank == 0:
            self._session.emit(EpochEnded(self._record))
        self._best = self._state.best_of(metrics[score], weights, metric=score, epoch=epoch, reference=self._reference)

    def _finish_epoch(self) -> Iterator[Step]:
        """Rehearse the next image size, or measure a wrong ceiling again; then save the epoch's checkpoint."""
        record, self._record = self._record, None
        if record is None:
            raise loop_error(
                f"`run.close_epoch` was not called at the end of an epoch, in step {self._cursor.done - 1}"
            )
        yield from self._rehearsal.after_epoch(record)
        self._live_metrics.ceiling_images_per_second = self._ceiling_of_rank
        self._meter.reset()
        self._checkpoint()


def require(holds: object, otherwise: str) -> None:
    """Raise a UsageError about the job's loop unless a condition holds."""
    if not holds:
        raise loop_error(otherwise)


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; the time until the first one is a phase of the start."""
    for first in batches:
        start_clock.mark("first batch")
        yield first
        break
    yield from batches
