"""The training function's interface to its run and to the driver: worker, run folder, checkpoints, messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydali.data.stream.stream import Stream
from raydali.measure.records import Figures
from raydali.run.checkpoints import CheckpointStore
from raydali.run.events import Notice
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, RankWarning
from raydali.training.weights.matching import MatchedWeights
from raydali.training.worker import Worker


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


class Session(ABC):
    """A rank's access to its run; a `RaySession` in a worker of Ray Train.

    Args:
        worker: this rank.
        folder: the folder of the run.
        is_kept: returns whether the checkpoint after a step is kept permanently.

    Attributes:
        worker, folder: see the arguments.
        cursor: the position of the run.
        steps_left: number of remaining steps of the training loop; 0 after its end.
        checkpoints: the checkpoints of the run.
        group: the id of the worker group in the ledger.
        validation_samples: number of samples of each validation.
        validates: returns whether an epoch is validated.
        parameters: number of the model's parameters.
        short_seconds: the length of a short run for `raydali plan`; None: the whole run.
    """

    def __init__(self, worker: Worker, folder: RunFolder, is_kept: Callable[[int], bool] = lambda _: False) -> None:
        self.worker, self.folder = worker, folder
        self.cursor, self.steps_left, self.group, self.parameters = Cursor(), 0, "", 0
        self.short_seconds: float | None = None
        self.validation_samples, self.validates = 0, lambda _: True
        self.checkpoints = CheckpointStore(folder, worker, self.emit, is_kept)

    def commit(self, step: int, state: dict[str, Any] | None, **options: Any) -> None:
        """Save a checkpoint of rank 0's state, see `CheckpointStore.save`. All ranks must call it, others with None."""
        if state is not None:
            self.checkpoints.save(step, state, **options)

    def warn(self, text: str) -> None:
        """Show a warning on the driver's console, with the number of this rank."""
        self.emit(RankWarning(self.worker.rank, text))

    @abstractmethod
    def emit(self, message: Message) -> None:
        """Send a message to the driver, without waiting."""

    def emit_once(self, message: Message) -> None:
        """Send a message that all ranks have, from rank 0."""
        if self.worker.rank == 0:
            self.emit(message)

    @abstractmethod
    def starting_weights(self) -> MatchedWeights | None:
        """Return what the model of a fresh run starts from; None for random weights."""

    @abstractmethod
    def report_start(self, *, steps: int) -> None:
        """Report from rank 0 that the first step of a run of so many steps is complete."""

    @abstractmethod
    def report_progress(self, stream: Stream) -> None:
        """Report the progress in this stream from rank 0 at intervals; cheap enough to call after every step."""

    @abstractmethod
    def notice(self) -> Notice | None:
        """Return the reason if this rank should leave between two steps; cheap enough to call at every step.

        Raises:
            DivergedError: the state of the newest checkpoint is not finite.
        """

    @abstractmethod
    def publish(self, figures: Figures) -> None:
        """Publish this rank's measurements of the last seconds, for monitoring and the console."""
