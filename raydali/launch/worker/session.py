"""The training function's interface to the launcher: worker, run folder, checkpoints, messages to the driver."""

from dataclasses import dataclass
from typing import Any, Protocol

from raydali.measure.records import Figures
from raydali.run.events import Notice
from raydali.run.folder import RunFolder
from raydali.run.messages import Message
from raydali.train.worker import Worker


@dataclass
class Cursor:
    """The position of a run in its stream, counted in global batches; the session's one object is all that holds it.

    Attributes:
        start: the newest checkpoint's position when this worker group began; 0 on a fresh run.
        done: global batches that were trained on.
        saved: global batches that the newest checkpoint covers.
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
    """Number of steps until the end of the training loop, as far as the loop has begun; 0 at its end."""

    @property
    def worker(self) -> Worker:
        """This process: its rank, device and process group."""
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

    def commit(
        self, step: int, state: dict[str, Any] | None, *, best: dict[str, Any] | None = None, save_error: str = ""
    ) -> None:
        """Save a checkpoint of rank 0's state in the background. All ranks must call it, the others with None.

        If it cannot be saved, that is an event, and the previous one stays the newest.

        Args:
            step: global batches that it covers; no two checkpoints of a run have the same.
            state: a snapshot; it must not change afterwards.
            best: weights to keep in the run's `best/`, as the best so far.
            save_error: why there can be no checkpoint now: the rows before it could not be written.

        Raises:
            StorageError: five in a row could not be saved.
        """
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is saved; if that fails, it is retried for a minute.

        Raises:
            StorageError: it cannot be saved.
        """
        ...

    def emit(self, message: Message) -> None:
        """Send a message to the driver, without waiting."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning on the driver's console, with this rank."""
        ...

    def report_start(self, *, steps: int) -> None:
        """Report the first completed step, of `steps` of the run, to the driver; from rank 0."""
        ...

    def report_progress(self, *, steps: int, epoch: int, epochs: int, samples_consumed: int) -> None:
        """Report a completed step to the driver, from rank 0 and at intervals; cheap enough for every step."""
        ...

    def notice(self) -> Notice | None:
        """Return why this rank should leave between two steps, if it should; cheap enough for every step."""
        ...

    def publish(self, figures: Figures) -> None:
        """Publish what this rank measured in the last seconds, for monitoring and the console."""
        ...
