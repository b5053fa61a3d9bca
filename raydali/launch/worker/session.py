"""The training function's interface to the launcher: worker, run folder, checkpoints, messages to the driver."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from raydali.measure.records import Figures
from raydali.run.events import Notice
from raydali.run.folder import RunFolder
from raydali.run.messages import Message
from raydali.run.model_file import BestWeights
from raydali.train.weights.matching import MatchedWeights
from raydali.train.worker import Worker


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

    def resume(self, steps: int) -> None:
        """Move to the position of a checkpoint."""
        self.start = self.done = self.saved = steps


class Session(Protocol):
    """The interface of a training function to the launcher; `RaySession` implements it on Ray."""

    @property
    def cursor(self) -> Cursor:
        """The position of the run."""
        ...

    steps_left: int
    """Number of remaining steps of the training loop; 0 after its end."""

    @property
    def worker(self) -> Worker:
        """The worker that this process is: rank, device and process group."""
        ...

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        ...

    def latest(self) -> dict[str, Any] | None:
        """Return the state of the newest usable checkpoint, or None on a fresh run. All ranks must call it.

        Raises:
            StorageError: there were checkpoints, but none can be used.
        """
        ...

    def starting_weights(self) -> MatchedWeights | None:
        """Return what the model of a fresh run starts from; None for random weights."""
        ...

    def commit(
        self,
        step: int,
        state: dict[str, Any] | None,
        *,
        best: BestWeights | None = None,
        save_error: str = "",
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Save a checkpoint of rank 0's state in the background. All ranks must call it, the others with None.

        A failure is reported as an event, and the previous checkpoint remains the newest.

        Args:
            step: number of global batches that the checkpoint covers; unique among the checkpoints of a run.
            state: a snapshot; it must not change after `before_writing`.
            best: the best weights so far, to be saved in the run's `best/`.
            save_error: why the rows before the checkpoint could not be written; then it counts as a failed one.
            before_writing: called on rank 0, in the background; `notice` raises its error if it is no OSError.

        Raises:
            StorageError: several consecutive checkpoints could not be saved (see `CheckpointStore.save`).
        """
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is saved; a failure is retried for a minute.

        Raises:
            StorageError: the checkpoint cannot be saved.
        """
        ...

    def emit(self, message: Message) -> None:
        """Send a message to the driver, without waiting."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning on the driver's console, with the number of this rank."""
        ...

    def report_start(self, *, steps: int) -> None:
        """Report from rank 0 to the driver that the first step is complete.

        Args:
            steps: number of steps of the run.
        """
        ...

    def report_progress(self, *, steps: int, epoch: int, epochs: int, samples_consumed: int) -> None:
        """Report progress from rank 0 to the driver at intervals; cheap enough to call after every step."""
        ...

    def notice(self) -> Notice | None:
        """Return the reason if this rank should leave between two steps; cheap enough to call at every step.

        Raises:
            DivergedError: the state of the newest checkpoint is not finite.
        """
        ...

    def publish(self, figures: Figures) -> None:
        """Publish this rank's measurements of the last seconds, for monitoring and the console."""
        ...
