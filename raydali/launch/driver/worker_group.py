"""A worker group as the driver knows it: what its workers do, what they have reported, and why it has failed."""

import copyreg
import importlib
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray

from raydali.data.index.source import TrainAndVal
from raydali.host import start_clock
from raydali.host.cpu_times import load
from raydali.launch.channel import DriverChannel
from raydali.launch.driver.endings import describe_deaths
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.job import WorkerTask
from raydali.options.every_job import TrainingOptions
from raydali.run.events import Failure, Left, Started, WorkerAddress
from raydali.run.folder import RunFolder
from raydali.run.messages import Heartbeat, HeartbeatEnded, Message, WorkerError
from raydali.text import plural

if TYPE_CHECKING:
    from raydali.launch.channel import Call
    from raydali.launch.trainer import GroupEnd
    from raydali.training.weights.matching import MatchedWeights

START_LINE_SECONDS = 25.0
"""Interval of lines on a group that starts."""


@dataclass(kw_only=True)
class WorkerGroup:
    """A worker group that was started.

    Attributes:
        number: its number, which its messages have.
        workers: how many it has.
        end: returns how it ended.
        watch: takes its heartbeats.
        errors: those that its workers have reported, oldest first.
        places: where its ranks run, by their heartbeats.
        joules: energy of their GPUs, as far as it is measured, likewise.
        doing: what a rank does while it starts, by the newest heartbeat.
        is_placed: whether it has its places.
        hung: the processes that were killed because they held it up.
        is_training: whether it has completed its first step.
        has_left: whether its workers have saved a checkpoint and left.
        is_late: whether it was ended because it was not ready in time.
        resize_to: the size of the group for which it must leave.
        leave_until: when it must have left for that.
        began, start_line_at: when it was started, and when the next line on its start is due; of the monotonic clock.
    """

    number: str
    workers: int
    end: "Call[GroupEnd]"
    watch: HangWatch
    errors: list[WorkerError] = field(default_factory=list)
    places: dict[int, WorkerAddress] = field(default_factory=dict)
    joules: dict[int, float] = field(default_factory=dict)
    doing: str = ""
    is_placed: bool = False
    hung: set[WorkerAddress] = field(default_factory=set)
    is_training: bool = False
    has_left: bool = False
    is_late: bool = False
    resize_to: int | None = None
    leave_until: float = float("inf")
    began: float = field(default_factory=time.monotonic)
    start_line_at: float = 0.0

    def take(self, message: Message) -> None:
        """Take a message of its workers."""
        match message:
            case Heartbeat():
                self.watch.heartbeat(message)
                self.places[message.rank] = message.node_id, message.pid
                self.doing = f"rank {message.rank}: {message.doing}"
                if message.joules is not None:
                    self.joules[message.rank] = message.joules
            case HeartbeatEnded():
                self.watch.forget(message.rank)
            case WorkerError():
                self.errors.append(message)
            case Started():
                self.is_training, self.has_left = True, False
                self.watch.training_started()
            case Left():
                self.has_left = True

    def start_line(self, now: float) -> str:
        """Return a line on its start if it is time to by the monotonic clock; otherwise an empty text."""
        if self.is_training or not self.is_placed or now < max(self.start_line_at, self.began + START_LINE_SECONDS):
            return ""
        self.start_line_at = now + START_LINE_SECONDS
        begun = f"{len(self.places)} of {plural(self.workers, 'worker process')} have started"
        return f"no first step after {now - self.began:.0f} s: {begun}; {self.doing or load()}"

    def places_of(self, ranks: Sequence[int]) -> dict[int, WorkerAddress]:
        """Return where these ranks run, as far as it is known."""
        return {rank: self.places[rank] for rank in ranks if rank in self.places}

    def described(self, failure: Failure, start_timeout: float) -> Failure:
        """Return the group's failure with places, and the cause of deaths.

        Args:
            failure: as Ray Train reports it.
            start_timeout: seconds after which the group was ended if it is late.
        """
        if self.is_late:
            late = f"a worker was not ready within {start_timeout:g} s (--start-timeout)"
            return replace(failure, error=late, starting=True)
        places, error = self.places_of(failure.ranks), failure.error
        if failure.killed:
            error = describe_deaths(failure.killed, places, error, self.hung)
        nodes = sorted({node_id[:8] for node_id, _ in places.values()})
        return replace(failure, error=error, places=places, nodes=nodes)


def worker_task(
    train: Callable[..., None],
    data: TrainAndVal[Any],
    weights: "MatchedWeights | None",
    options: TrainingOptions,
    folder: RunFolder,
    attempt: str,
    short_seconds: float | None = None,
) -> WorkerTask:
    """Return the task of this driver's workers, with what is large in Ray's object store; see `WorkerTask`."""
    pickle_modules_of_torch()
    return WorkerTask(
        train=train,
        data=ray.put(data),
        samples=len(data.train),
        weights=ray.put(weights),
        options=options,
        folder=folder,
        attempt=attempt,
        marks=start_clock.marks(),
        channel=DriverChannel(f"raydali-{uuid.uuid4().hex}"),
        short_seconds=short_seconds,
    )


def pickle_modules_of_torch() -> None:
    """Let a job's file import torch at its top.

    A function that uses the global `torch` and has any attribute `classes` or `ops`, as in `config.classes`, is pickled
    by cloudpickle with the modules `torch.classes` and `torch.ops`, which pickle refuses.
    """
    if torch := sys.modules.get("torch"):
        for module in (torch.classes, torch.ops):
            copyreg.pickle(type(module), lambda module: (importlib.import_module, (module.__name__,)))
