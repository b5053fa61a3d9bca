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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from raydali.data.loading.loader import Loader, LoaderOptions
from raydali.data.loading.make import make_loader
from raydali.data.sources.source import TrainAndVal
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.pipeline import Pipeline
from raydali.extras import default_loader
from raydali.host import start_clock
from raydali.launch.options import TrainingOptions
from raydali.launch.shared_options import WeightsOptions
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.checkpointing import RunState, Stateful
from raydali.launch.worker.missing_samples import check_samples
from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_ceiling import ceiling_conditions
from raydali.launch.worker.run_progress import RunProgress
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.launch.worker.step_context import StepContext
from raydali.launch.worker.step_loop import StepLoop, loop_error, require
from raydali.measure.flops import peak_flops
from raydali.run.messages import Note
from raydali.run.sample_trace import SampleTrace
from raydali.train.batchnorm import RunningStatistics, with_sync_batchnorm
from raydali.train.evaluation.forward import ValidationForward
from raydali.train.evaluation.validation_pass import ValidationPass
from raydali.train.finetuning import freeze
from raydali.train.precision import Precision
from raydali.train.step import ForwardBackward

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
        self._config, self._session = config, session
        self.worker, self.stream = session.worker, config.stream(samples)
        self.precision = Precision(config.precision, self.worker.device)
        self._micro_batches = self.stream.micro_batches_of(self.worker.rank, self.worker.world_size)
        self._broken = BrokenSamples(config, session, samples=samples)
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
        self._step_loop: StepLoop | None = None
        torch.manual_seed(config.seed)
        torch.set_default_dtype(self.precision.of_parameters)
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
        )
        self._context = StepContext(
            self.worker,
            self._micro_batches,
            self._config.seed,
            model,
            statistics,
            self.precision,
            self._state.before_update,
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
        require(self._parts, "call `run.register_state` before `run.differentiated`")
        differentiated = ForwardBackward(
            model,
            loss,
            self.worker,
            self.precision,
            micro_batches=self.stream.micro_batches_per_step,
            compiled=self._config.compile,
            fused=self._config.fused,
            graph=self._can_capture,
        )
        self._context.allreduce = differentiated.allreduce
        self._differentiated.append(differentiated)
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
        self._inferences.append((inference, inputs))
        return inference

    def _warm_up_inference(self) -> None:
        faster = [(inference, inputs) for inference, inputs in self._inferences if inference.is_faster]
        if faster:
            loader = self._val_loader
            batch = loader.resident_batch(min(self._config.batch_size, loader.order.samples))
            if self._config.compile and self.worker.rank == 0:
                self._session.emit(Note("compiling the validation"))
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
        require(self._parts, "call `run.register_state` before `run.steps`")
        is_ours = loader.order is self.stream and loader.start == self._cursor.start
        require(is_ours, "take the training loader from `run.loaders`")
        check_samples(loader, self.worker)
        rehearsal = Rehearsal(
            self._session,
            self._config,
            self._state,
            loader,
            self._val_loader,
            self._context,
            self._progress,
            self._parts,
            self._differentiated,
            self._warm_up_inference,
            captures=self._can_capture,
        )
        self._step_loop = StepLoop(
            self._config, self._session, self._state, self._progress, self._context, self._parts, rehearsal
        )
        yield from self._step_loop.steps(loader, self._val_loader)

    @contextmanager
    def validation(self) -> Iterator[ValidationPass]:
        """Prepare the weights for the validation inside this context; its time does not reduce the training rate.

        It yields what the job's evaluation takes. BatchNorm's statistics are averaged over ranks, and copied to the
        moving average.
        """
        with self._loop("validation").validation() as val:
            yield val

    def close_epoch(self, metrics: Mapping[str, Any], *, score: str, weights: nn.Module) -> None:
        """Write the epoch's record and a checkpoint; also save the weights in `best/` if the score is the highest.

        Args:
            metrics: results of the validation.
            score: name of the metric by which the best weights are chosen; higher is better.
            weights: the model, or its moving average.

        Raises:
            UsageError: no epoch ends at this step, the epoch is already closed, or there was no validation.
        """
        self._loop("close_epoch").close_epoch(metrics, score=score, weights=weights)

    def _loop(self, call: str) -> StepLoop:
        if self._step_loop is None:
            raise loop_error(f"call `run.{call}` only where `step.ends_epoch`")
        return self._step_loop
