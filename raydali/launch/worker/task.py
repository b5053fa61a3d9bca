"""The task of every worker, which the driver makes without importing PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydali.host import start_clock
from raydali.launch.channel import DriverChannel
from raydali.launch.options import LaunchOptions
from raydali.run.folder import RunFolder

if TYPE_CHECKING:
    import ray

    from raydali.train.weights.matching import MatchedWeights


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """A task is the same object for all workers of a run.

    Attributes:
        train, samples: see `launcher.Job`.
        data: the job's data, in Ray's object store.
        weights: what the model of a fresh run starts from, there too; None for random weights.
        attempt: the id of the driver's attempt.
        marks: the phases of the driver's start.
    """

    train: Callable[..., None]
    data: "ray.ObjectRef[Any]"
    samples: int
    weights: "ray.ObjectRef[MatchedWeights | None]"
    options: LaunchOptions
    folder: RunFolder
    attempt: str
    marks: list[start_clock.Mark]
    channel: DriverChannel
