"""What every training function does beside training: where to start, what to measure, when to save, whom to tell.

The loop stands in the job; it asks this for its steps and says what it did:

    run = TrainingRun(config, session, samples=len(data.train))
    run.register_state(model=model, ...)    as the newest checkpoint has them, and for all that follow
    run.warm_up(loader, train_step, ...)   compile, capture, measure the ceiling
    for step in run.steps():
        run.trained(train_step(batches, run.meter))
        if step.closes_epoch:
            run.close_epoch(validate(), ...)
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from raydali.data.loading.loader import Batch, Loader
from raydali.data.stream.class_mixing import useful_block
from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.stream import MicroBatch
from raydali.launch.channel import Interrupted
from raydali.launch.options import PLACEMENT_OPTIONS, TrainingOptions
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.checkpointing import RunState, Stateful
from raydali.launch.worker.missing_samples import check_samples
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.launch.worker.session import Session
from raydali.launch.worker.stop_signal import StopSignals
from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.measure.ceiling import Ceiling
from raydali.measure.live_metrics import LiveMetrics
from raydali.measure.meter import EpochMeter
from raydali.measure.records import RankRecord, epoch_record
from raydali.run.events import EpochEnded, Left, Notice
from raydali.run.sample_trace import SampleTrace
from raydali.train.precision import Precision
from raydali.train.profiling import StepTrace
from raydali.train.warmup import warm_up, warm_up_steps

OPTIONS_WITHOUT_STEP_COST = PLACEMENT_OPTIONS | {
    "name",
    "checkpoint_every",
    "trace_samples",
    "loader",
    "ceiling",
    "shuffle_window",
    "exclude",
    "max_bad_fraction",
    "val_data",
    "root",
}
"""Settings that change nothing about how long a step takes on a batch that lies on the device."""

TrainStep = Callable[[Iterator[Batch], EpochMeter], list[MicroBatch]]
"""One step of the optimiser on this rank's next micro-batches; returns them."""


@dataclass(frozen=True)
class Step:
    """A global batch about to be trained on.

    Attributes:
        index: its number in the run.
        progress: share of the run's samples that are consumed in the middle of it, 0..1: what learning rates follow.
        closes_epoch: whether an epoch's line falls behind it.
    """

    index: int
    progress: float
    closes_epoch: bool


class TrainingRun:
    """One worker's side of a run; all ranks must call the same methods in the same order.

    Args:
        config: the job's.
        session: what the launcher gave.
        samples: of the training set.
        labels: of the training set, int64 (N,), where each sample has one.

    Attributes:
        worker, stream: who this is, and the stream of ids of the run.
        micro_batches: how many of a global batch's micro-batches this rank takes.
        start: global batches that the newest checkpoint covers; 0 on a fresh run.
        meter: of the epoch under way, from the first step on.
    """

    def __init__(
        self, config: TrainingOptions, session: Session, *, samples: int, labels: NDArray[np.int64] | None = None
    ) -> None:
        self._config, self._session, self._folder = config, session, session.folder
        self.worker, self.stream = session.worker, config.stream(samples)
        self.micro_batches = self.stream.micro_batches_of(self.worker.rank, self.worker.world_size)
        self._useful_block = cache(lambda: useful_block(labels, self.stream))
        self._loader: Loader | None = None
        self._exchange: AllReduceTimer | None = None
        self._broken = BrokenSamples(config, session, samples=samples)
        self._notices = StopSignals(self.worker, session.notice)
        self._trace = SampleTrace(self._folder, self.worker.rank) if config.trace_samples else None
        self._state = RunState(session, self.stream, self._broken, self._trace, self._ceiling_of())
        self.start = self._done = self._state.start
        self.meter: EpochMeter
        self._pulse: LiveMetrics
        self._ceiling: RunCeiling | None = None

    @property
    def _on_gpu(self) -> bool:
        return self.worker.device.type == "cuda"

    def _ceiling_of(self) -> dict[str, str]:
        settings = {
            name: repr(value) for name, value in asdict(self._config).items() if name not in OPTIONS_WITHOUT_STEP_COST
        }
        threads = f"{torch.get_num_threads()} threads of a CPU"
        on = torch.cuda.get_device_name(self.worker.device) if self._on_gpu else threads
        return settings | {"world_size": str(self.worker.world_size), "on": on}

    def _new_meter(self) -> EpochMeter:
        worker = self.worker
        who: dict[str, Any] = {"rank": worker.rank, "world_size": worker.world_size, "node": worker.node}
        return EpochMeter(worker.device, **who, loader=self._loader)

    def _new_pulse(self) -> LiveMetrics:
        return LiveMetrics(
            self.meter,
            batch_size=self._config.batch_size,
            micro_batches=self.micro_batches,
            ceiling_images_per_second=self._ceiling_of_rank(),
            prepared=lambda: self._loader.prepared_batches if self._loader is not None else None,
            publish=self._session.publish,
        )

    def _ceiling_of_rank(self) -> float | None:
        share = self.micro_batches / self.stream.micro_batches_per_step
        return self._state.ceiling * share if self._state.ceiling else None

    @property
    def can_capture(self) -> bool:
        """Whether a step can be one CUDA graph: a GPU, one micro-batch a worker, statistics of its own."""
        config = self._config
        alone = self.stream.micro_batches_per_step == self.worker.world_size and not config.sync_bn
        return config.cuda_graph and self._on_gpu and alone

    def loader_settings(self) -> dict[str, Any]:
        """Keyword arguments of `make_loader` for this worker."""
        return {
            "rank": self.worker.rank,
            "world_size": self.worker.world_size,
            "device": self.worker.device,
            "threads": self.worker.cpus,
            "quarantine": self._broken.of,
        }

    def register_state(self, *, before_saving: Callable[[], None] = lambda: None, **parts: "Stateful | None") -> None:
        """Load these parts from the newest checkpoint, if there is one, and save them in all that follow.

        Args:
            before_saving: called on every rank.
            parts: by the name they have in checkpoints; None for what this run does without. An optimiser keeps its
                settings: only momenta are loaded.
        """
        kept = {name: part for name, part in parts.items() if part is not None}
        if isinstance(model := kept.get("model"), nn.Module) and self.worker.world_size > 1:
            self._exchange = AllReduceTimer(model)
        self._state.keep(kept, before_saving)

    def warm_up(
        self,
        loader: Loader,
        train_step: TrainStep,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        precision: Precision,
    ) -> None:
        """Compile, capture and measure the ceiling on a resident batch, while no loader is at work; leaves no trace.

        Args:
            modules: all that a step changes: the model, and its moving average.

        Raises:
            NodeFault: see `check_samples`.
        """
        self._loader = loader
        check_samples(loader, self.worker)
        micro_batch = self.stream.micro_batch(0, self.worker.rank)
        resident_batch = cache(lambda: loader.resident_batch(self._config.batch_size))

        def take_practice(steps: int, measures: bool) -> Ceiling:
            resident, practice = repeat(Batch(resident_batch(), micro_batch)), self._new_meter()
            return warm_up(
                lambda: train_step(resident, practice),
                modules,
                optimizer,
                precision,
                self.worker,
                steps=steps,
                images=self.micro_batches * self._config.batch_size,
                measures_ceiling=measures,
            )

        self._ceiling = RunCeiling(self._session, self._state, take_practice)
        measures = self._config.ceiling and not self._state.is_resumed
        if self._on_gpu or measures or self._config.compile:
            doing = ["compiling"] * bool(self._config.compile) + ["capturing a CUDA graph"] * self.can_capture
            self._ceiling.begin(warm_up_steps(self.worker.device), measures=measures, what=", ".join(doing))

    def steps(self) -> Iterator[Step]:
        """The steps that are left; between two of them a checkpoint is made where one is due."""
        self._state.discard_checkpoint()
        # Else a collection now and then walks all that imports and compilers left, and takes longer than a step.
        gc.collect()
        gc.freeze()
        every = self._config.checkpoint_every
        of_run = self._config.epochs * self.stream.samples
        self.meter = self._new_meter()
        self.meter.enter("loop")
        self._pulse = self._new_pulse()
        trace = self._step_trace()
        for index in range(self.start, self.stream.steps):
            trace.before(index)
            progress = (index + 0.5) * self.stream.global_batch_size / of_run
            yield Step(index, progress, self.stream.epoch_closed_by(index) is not None)
            trace.after(index)
            if every and self._done % every == 0 and self._state.saved < self._done:
                self._checkpoint()
            if notice := self._notices.poll():
                self._leave(notice)

    def _step_trace(self) -> StepTrace:
        asked = self._config.profiled or range(0)
        steps = range(max(asked.start, self.start), min(asked.stop, self.stream.steps))
        if asked and not steps and self.worker.rank == 0:
            left = f"steps {self.start} to {self.stream.steps - 1} are left to do"
            self._session.warn(f"--profile-steps {self._config.profile_steps}: only {left}")
        trace = StepTrace(steps, self.worker.rank, self.worker.device, self._folder.write)
        if steps:
            self.meter.on_stage = trace.stage
        return trace

    def _leave(self, notice: Notice) -> None:
        """Make a checkpoint of all that is done, and go once it is saved."""
        if self._state.saved < self._done:
            self._checkpoint()
        self._session.finish()
        if self.worker.rank == 0:
            self._session.emit(Left(notice=notice, step=self._done))
        self.worker.barrier()
        raise Interrupted(notice)

    def take_step(self, batches: Iterator[Batch], meter: EpochMeter) -> Iterator[tuple[int, Batch]]:
        """This rank's batches of a step, numbered from 0; what draws random numbers is seeded for each of them."""
        if self._exchange is not None:
            self._exchange.sample(meter)
        for index in range(self.micro_batches):
            meter.enter("loader_wait")
            batch = next(batches)
            meter.first_batch()
            meter.enter("step")
            if self._exchange is not None:
                self._exchange.expect(meter if index == self.micro_batches - 1 else None)
            torch.manual_seed(int(keyed(self._config.seed, batch.micro_batch.number)) >> 1)
            yield index, batch

    def trained(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Say that a step is done, and what it trained on: for the trace and the driver.

        Raises:
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks at the same step.
        """
        self.meter.replaced += sum(micro_batch.replaced for micro_batch in micro_batches)
        if self._trace is not None:
            for micro_batch in micro_batches:
                self._trace.add(micro_batch)
        steps, step = self.stream.steps, self._done
        self._done += 1
        self.meter.end_step()
        self._broken.after_step(self._done)
        if step == self.start:
            self._session.report_start(step=step, steps=steps)
        consumed = self.stream.state(self._done)["samples_consumed"]
        self._session.report_progress(
            step=self._done,
            steps=steps,
            epoch=self.stream.epoch_of(step),
            epochs=self._config.epochs,
            samples_consumed=consumed,
        )
        self._pulse.step()

    def close_epoch(
        self, validation: Mapping[str, Any], *, learning_rate: float, score: float, weights: nn.Module
    ) -> None:
        """Write the epoch's line and a checkpoint, which keeps the weights in `best/` if the score is the highest."""
        self._broken.exchange()

        def line(segments: Sequence[Sequence[RankRecord]]) -> dict[str, Any]:
            return epoch_record(
                segments,
                epoch=self.stream.epoch_closed_by(self._done - 1) or 0,
                step=self._done,
                samples_consumed=self.stream.state(self._done)["samples_consumed"],
                learning_rate=learning_rate,
                validation={**validation, "broken": self._broken.in_validation()},
                quarantined=sum(record.replaced for segment in segments for record in segment),
                ceiling_images_per_second=self._state.ceiling,
                options=self._config,
                useful_block=self._useful_block,
            )

        record = self._state.close_epoch(self.meter.record(), line)
        self._pulse.end_epoch()
        if record is not None:
            self._session.emit(EpochEnded(record))
        if self._ceiling is not None:
            self._ceiling.doubt(record, is_last=self._done == self.stream.steps)
            self._pulse.ceiling_images_per_second = self._ceiling_of_rank()
        self.meter.reset()
        self._checkpoint(self._state.best_of(score, weights))

    def _checkpoint(self, best: dict[str, Any] | None = None) -> None:
        self.meter.enter("checkpoint")
        self._state.save(self._done, self.meter.record(), best)
        self.meter.enter("loop")
