"""What the launcher gives to a job's training function: the worker, the run's folder, checkpoints, the driver's ear."""

from typing import Any, Protocol

from raydali.launch.channel import Notice
from raydali.measure.live_metrics import Figures
from raydali.run.folder import RunFolder
from raydali.train.worker import Worker


class Session(Protocol):
    """All that a training function needs from its surroundings; ray_session.py has Ray's."""

    @property
    def worker(self) -> Worker:
        """Who this process is."""
        ...

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        ...

    def latest(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint that can be used, or None on a fresh run. All ranks must call it.

        Raises:
            StorageError: there were checkpoints, but none can be used.
        """
        ...

    def commit(
        self, step: int, state: dict[str, Any] | None, *, best: dict[str, Any] | None = None, hindered: str = ""
    ) -> None:
        """Make a checkpoint of rank 0's state, in the background. All ranks must call it, the others with None.

        Where it cannot be saved, that is an event, and the one before stays the newest.

        Args:
            step: global batches that it covers; no two checkpoints of a run have the same.
            state: a snapshot; it must not change afterwards.
            best: weights to keep as the best so far, in the run's `best/`.
            hindered: why there can be no checkpoint now: what it would cover could not be written.

        Raises:
            StorageError: five in a row could not be saved.
        """
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is saved; where that fails it is tried for a minute more.

        Raises:
            StorageError: it cannot be saved.
        """
        ...

    def tell(self, kind: str, **facts: Any) -> None:
        """Tell the driver something, without waiting."""
        ...

    def tell_start(self, *, step: int, steps: int) -> None:
        """Tell the driver, from rank 0, that the first step is done: it began at `step` of `steps`."""
        ...

    def tell_progress(self, *, step: int, steps: int, epoch: int, epochs: int, samples_consumed: int) -> None:
        """Tell the driver, from rank 0 and now and then, how far training is; cheap enough for every step."""
        ...

    def notice(self) -> Notice | None:
        """What this rank was told to heed between two steps, if anything; cheap enough for every step."""
        ...

    def publish(self, figures: Figures) -> None:
        """Hand on what this rank measured in the last seconds, to whoever watches the cluster."""
        ...
