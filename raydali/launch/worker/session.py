"""The training function's interface to its run and to the driver: worker, run folder, checkpoints, messages."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.load.loader import Loader
from raydali.data.stream.stream import Stream
from raydali.host import start_clock
from raydali.measure.records import Figures
from raydali.run.checkpoints import CheckpointStore
from raydali.run.events import Notice, Resumed, Started
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, Progress, RankFigures, RankWarning
from raydali.training.bad_losses import LossWatch
from raydali.training.weights.matching import MatchedWeights
from raydali.training.worker import Worker

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.context import TrainContext

    from raydali.launch.channel import DriverChannel

PROGRESS_SECONDS = 0.5
"""Interval at which rank 0 sends its progress to the driver, and asks for the driver's notice."""


@dataclass
class Cursor:
    """The position of a run in its stream, in global batches. The session has the only such object of a worker.

    Attributes:
        start: position of the newest checkpoint when this worker group began; 0 in a fresh run.
        done: number of global batches that were trained on.
        saved: number of global batches that the newest checkpoint covers.
    """

    start: int = 0
    done: int = 0
    saved: int = 0


class Session:
    """A rank's access to its run.

    Args:
        worker: this rank.
        folder: the folder of the run.
        channel: takes messages to the driver, and has its notice.
        context: Ray Train's context of this worker.
        environment: the versions and nodes of all workers, see `Started`.
        weights: returns what the model of a fresh run starts from; None for random weights.
        is_kept: returns whether the checkpoint after a step is kept permanently.
        export: takes the figures of this rank, for Prometheus.
        group: the id of the worker group in the ledger.
        short_seconds: the length of a short run for `raydali plan`; None: the whole run.

    Attributes:
        worker, folder, group, short_seconds: see the arguments.
        starting_weights: the argument `weights`.
        cursor: the position of the run.
        steps_left: number of remaining steps of the training loop; 0 after its end.
        checkpoints: the checkpoints of the run. Ray Train's are not used: it ends a run if it cannot rewrite its record
            of them.
        class_labels: the classes of the training samples (N,), for `--class-sampling`.
        validation_samples: number of samples of each validation.
        validates: returns whether an epoch is validated.
        most_epochs: number of epochs after which the training loop ends at the latest.
        early_end: why it has ended before the run's last epoch; None if it has not.
        parameters: number of the model's parameters.
        loss_watch: makes what watches the losses of steps.
    """

    def __init__(
        self,
        worker: Worker,
        folder: RunFolder,
        channel: "DriverChannel",
        context: "TrainContext",
        *,
        environment: Mapping[str, Any] | None = None,
        weights: Callable[[], MatchedWeights | None],
        is_kept: Callable[[int], bool] = lambda _: False,
        export: Callable[[Figures], None] = lambda _: None,
        group: str = "",
        short_seconds: float | None = None,
    ) -> None:
        self.worker, self.folder, self.group, self.short_seconds = worker, folder, group, short_seconds
        self._channel, self._context, self._environment, self._export = channel, context, environment or {}, export
        self.starting_weights = weights
        self.cursor, self.steps_left, self.parameters = Cursor(), 0, 0
        self.validation_samples, self.validates = 0, lambda _: True
        self.class_labels: NDArray[np.int64] | None = None
        self.most_epochs: int | None = None
        self.early_end: str | None = None
        self.checkpoints = CheckpointStore(folder, worker, self.emit, is_kept)
        self.loss_watch: Callable[..., LossWatch] = LossWatch
        self._batches_before, self._last_progress = 0, 0.0
        self._driver_notice: Notice | None = None

    def commit(self, step: int, state: dict[str, Any] | None, **options: Any) -> None:
        """Save a checkpoint of rank 0's state, see `CheckpointStore.save`. All ranks must call it, others with None."""
        if state is not None:
            self.checkpoints.save(step, state, **options)

    def warn(self, text: str) -> None:
        """Show a warning on the driver's console, with the number of this rank."""
        self.emit(RankWarning(self.worker.rank, text))

    def emit(self, message: Message) -> None:
        """Send a message to the driver, without waiting."""
        self._channel.post(message)

    def emit_once(self, message: Message) -> None:
        """Send a message that all ranks have, from rank 0."""
        if self.worker.rank == 0:
            self.emit(message)

    def report_start(self, *, steps: int) -> None:
        """Report from rank 0 that the first step of a run of so many steps is complete."""
        if self.worker.rank == 0:
            started = Resumed if self.cursor.start else Started
            self.emit(
                started(
                    step=self.cursor.start,
                    steps=steps,
                    world_size=self.worker.world_size,
                    device=self.worker.device.type,
                    **self._environment,
                    parameters=self.parameters,
                    train_run=self._context.train_run_context.run_id,
                    phases=start_clock.phases(),
                )
            )

    def report_progress(self, stream: Stream) -> None:
        """Report the progress in this stream from rank 0 at intervals; cheap enough to call after every step."""
        self._batches_before, now = Loader.batches_taken, time.monotonic()
        if self.worker.rank == 0 and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress, step = now, self.cursor.done
            epoch, epochs = stream.epoch_of(step - 1), self.most_epochs or stream.epochs
            self.emit(
                Progress(
                    step=step,
                    steps=stream.end_step(epochs - 1),
                    epoch=epoch,
                    epochs=epochs,
                    samples_consumed=stream.state(step)["samples_consumed"],
                    validations=sum(map(self.validates, range(epoch, epochs))),
                    validation_samples=self.validation_samples,
                )
            )
            self._driver_notice = self._channel.notice()

    def progress(self) -> float:
        """Return the progress of this rank; see HeartbeatThread."""
        return self.cursor.done + (0.5 if Loader.batches_taken > self._batches_before else 0.0)

    def notice(self) -> Notice | None:
        """Return the reason if this rank should leave between two steps; cheap enough to call at every step.

        Raises:
            DivergedError: the state of the newest checkpoint is not finite.
        """
        if (error := self.checkpoints.error) is not None:
            raise error
        if self._context.preemption_context.preemption_info is not None:
            return "preemption"
        return self._driver_notice

    def publish(self, figures: Figures) -> None:
        """Publish this rank's measurements of the last seconds, for monitoring and the console."""
        self._export(figures)
        self.emit(RankFigures(self.worker.rank, figures))
