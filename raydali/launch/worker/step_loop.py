"""The loop over the steps of a run: rehearsal, steps, ends of epochs, checkpoints, and leaving on notice."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim.swa_utils import AveragedModel

from raydali.data.loading.loader import Batch, Loader
from raydali.data.stream.stream import Stream
from raydali.errors import UsageError
from raydali.host import start_clock
from raydali.launch.channel import Interrupted
from raydali.launch.options import TrainingOptions
from raydali.launch.worker.checkpointing import RunState, Stateful
from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_progress import RunProgress
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.launch.worker.step_context import StepContext
from raydali.launch.worker.stop_signal import StopSignals
from raydali.run.events import Left, Notice
from raydali.run.model_file import BestWeights
from raydali.train.evaluation.reference import Reference, ReferenceWatch
from raydali.train.evaluation.validation_pass import ValidationPass


class _Closed(NamedTuple):
    """An epoch that the job has closed: its record, the best weights if they are new, and samples of the validation."""

    record: dict[str, Any]
    best: BestWeights | None
    reference: Reference | None


class StepLoop:
    """The loop over the steps of a run, on one rank. All ranks must call the same methods.

    Args:
        context: what all steps share.
        progress: measures and counts the steps.
        parts: the parts of the run's state, by their names in checkpoints.
    """

    def __init__(
        self,
        config: TrainingOptions,
        session: Session,
        state: RunState,
        progress: RunProgress,
        context: StepContext,
        parts: Mapping[str, Stateful],
        rehearsal: Rehearsal,
    ) -> None:
        self._config, self._session, self._cursor = config, session, session.cursor
        self._state, self._progress, self._rehearsal = state, progress, rehearsal
        self._context, self._parts, self._worker = context, parts, session.worker
        self._stop_signals = StopSignals(session.worker, session.notice)
        self._newest: Step | None = None
        self._closed: _Closed | None = None
        self._validation_seconds: float | None = None
        self._reference: Reference | None = None
        self._watch: ReferenceWatch
        self._stream: Stream

    def steps(self, loader: Loader, val_loader: Loader) -> Iterator[Step]:
        """Yield the remaining steps; see `TrainingRun.steps`."""
        assert isinstance(loader.order, Stream)
        self._stream = stream = loader.order
        self._watch = ReferenceWatch(val_loader)
        yield from self._rehearsal.before_first_step()
        self._state.discard_checkpoint()
        # Freeze the objects that imports and compilers have created: to collect among them takes longer than a step.
        gc.collect()
        gc.freeze()
        cursor, every, progress = self._cursor, self._config.checkpoint_every, self._progress
        progress.begin(loader)
        trace, batches = progress.step_trace(), _marked(iter(loader))
        for index in range(cursor.start, stream.steps):
            trace.before(index)
            ends_epoch = stream.epoch_closed_by(index) is not None
            self._newest = Step(
                self._context,
                batches,
                progress.meter,
                index=index,
                progress=(index + 0.5) * stream.global_batch_size / (self._config.epochs * stream.samples),
                ends_epoch=ends_epoch,
                on_update=progress.finish_step,
            )
            yield self._newest
            self._newest.check_end()
            if ends_epoch:
                yield from self._finish_epoch()
                if self._worker.device.type == "cuda" and cursor.done < stream.steps:
                    val_loader.begin_ahead()  # for the next validation, while training runs; a CPU has no time for it
            trace.after(index)
            if every and cursor.done % every == 0 and cursor.saved < cursor.done:
                self._checkpoint()
            if notice := self._stop_signals.poll():
                self._leave(notice)
            self._session.steps_left = stream.steps - cursor.done
        self._rehearsal.finish()

    @contextmanager
    def validation(self) -> Iterator[ValidationPass]:
        """Prepare the weights for the validation inside this context; see `TrainingRun.validation`."""
        began = time.perf_counter()
        with self._progress.meter.stage("validation"):
            self._context.statistics.average(self._worker)
            for part in self._parts.values():
                if isinstance(part, AveragedModel):
                    for averaged, current in zip(part.module.buffers(), self._context.model.buffers(), strict=True):
                        averaged.copy_(current)
            with self._watch.watching() as loader:
                yield ValidationPass(loader, loader.source, self._worker, self._context.precision)
            self._reference = self._watch.take() if self._worker.rank == 0 else None
        self._validation_seconds = time.perf_counter() - began

    def close_epoch(self, metrics: Mapping[str, Any], *, score: str, weights: nn.Module) -> None:
        """Write the epoch's record, and keep the best weights; see `TrainingRun.close_epoch`."""
        if self._newest is not None:
            self._newest.check_end()
        is_open = self._newest is not None and self._newest.ends_epoch and self._closed is None
        require(is_open, "call `run.close_epoch` once, only where `step.ends_epoch`")
        seconds, self._validation_seconds = self._validation_seconds, None
        require(seconds is not None, "validate inside `with run.validation():` before `run.close_epoch`")
        require(score in metrics, f"score={score!r} must be one of the metrics {', '.join(metrics)}")
        record = self._progress.end_epoch(
            {**metrics, "seconds": seconds}, self._context.learning_rate, self._state.flops_per_image
        )
        epoch = self._stream.epoch_closed_by(self._cursor.done - 1) or 0
        reference, self._reference = self._reference, None
        best = self._state.best_of(metrics[score], weights, metric=score, epoch=epoch, reference=reference)
        self._closed = _Closed(record, best, reference)

    def _finish_epoch(self) -> Iterator[Step]:
        """Rehearse the next image size, or measure a wrong ceiling again; then save the epoch's checkpoint."""
        closed, self._closed = self._closed, None
        if closed is None:
            raise loop_error(
                f"`run.close_epoch` was not called at the end of an epoch, in step {self._cursor.done - 1}"
            )
        yield from self._rehearsal.after_epoch(closed.record)
        self._progress.begin_epoch()
        self._checkpoint(closed.best, closed.reference)

    def _checkpoint(self, best: BestWeights | None = None, reference: Reference | None = None) -> None:
        with self._progress.meter.stage("checkpoint"):
            self._state.save(self._progress.meter.record, best, reference)

    def _leave(self, notice: Notice) -> None:
        """Save a checkpoint of all completed steps, and then leave."""
        if self._cursor.saved < self._cursor.done:
            self._checkpoint()
        self._session.finish()
        if self._worker.rank == 0:
            self._session.emit(Left(notice=notice, step=self._cursor.done))
        self._worker.barrier()
        raise Interrupted(notice)


def require(holds: object, otherwise: str) -> None:
    """Raise a UsageError about the job's loop unless a condition holds."""
    if not holds:
        raise loop_error(otherwise)


def loop_error(text: str) -> UsageError:
    """Return an error about the job's loop."""
    return UsageError(f"the training loop is wrong: {text}; see docs/own-data.md for the loop")


def _marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; the time until the first one is a phase of the start."""
    for first in batches:
        start_clock.mark("first batch")
        yield first
        break
    yield from batches
