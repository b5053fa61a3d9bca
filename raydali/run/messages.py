"""Messages to the driver that are not recorded; run/events.py has the recorded ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydali.measure.records import Figures

HEARTBEAT_SECONDS = 2.0
"""Interval between two heartbeats of a worker."""
MORE_WARNINGS = "there are more warnings; Ray's logs of the workers have them"
"""The text that replaces the warnings beyond a limit."""


class Message:
    """A message to the driver."""


@dataclass(frozen=True, kw_only=True)
class WorkerMessage(Message):
    """A message of a worker group; the driver ignores it if the group has ended.

    Attributes:
        group: the number of the group.
    """

    rank: int
    group: str


@dataclass(frozen=True, kw_only=True)
class Heartbeat(WorkerMessage):
    """The progress of a rank, sent every `HEARTBEAT_SECONDS`.

    Attributes:
        node, node_id, pid, started: identify its process; see `host.cpu_times.start_ticks`.
        count: number of batches consumed so far, validation included, and of calls that were retried.
        progress: completed steps, plus 0.5 once the next step's batch has arrived; comparable across ranks.
        stack: stack trace of the training thread if it has made no progress for a while.
        waits: whether the training thread waits for other ranks.
        joules: energy of the rank's GPU since the worker began to use it; None if it is not measured.
        doing: the phase before the first step that has ended last, and how busy the rank's node is.
    """

    node: str
    node_id: str
    pid: int
    started: int | None
    count: int
    progress: float
    stack: str | None
    waits: bool
    joules: float | None = None
    doing: str = ""


@dataclass(frozen=True, kw_only=True)
class HeartbeatEnded(WorkerMessage):
    """A worker has finished; it sends no more heartbeats. `node_id` and `pid` identify its process."""

    node_id: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerError(WorkerMessage):
    """The exception that ended a worker.

    Attributes:
        step: the last step that the rank completed; 0 before its group's first step.
        traceback: the frames outside libraries; empty for raydali's own errors, whose message is sufficient.
        usage: whether it is a UsageError.
        final: whether a restart would end in the same way.
        storage: whether the cause is that the storage does not answer.
        node_fault: whether only this node causes the error.
    """

    step: int
    node_id: str
    error: str
    traceback: str = ""
    usage: bool = False
    final: bool = False
    storage: bool = False
    node_fault: bool = False


@dataclass(frozen=True)
class Note(Message):
    """A line for the console."""

    text: str


@dataclass(frozen=True)
class RankWarning(Message):
    """A warning of a rank, for the console."""

    rank: int
    text: str


@dataclass(frozen=True)
class ForwardedWarning(Message):
    """A warning from `warnings` or `logging` in a worker; the driver merges equal ones."""

    rank: int
    text: str


@dataclass(frozen=True)
class Placed(Message):
    """A group with fewer workers than the maximum is about to start, because resources are missing."""

    workers: int
    maximum: int


@dataclass(frozen=True, kw_only=True)
class Progress(Message):
    """The progress of training, from rank 0.

    Attributes:
        step: number of completed steps; `steps` is the run's total.
        epoch: the current epoch; `epochs` is the run's total.
        validations: number of validations that remain, the one of the current epoch included.
        validation_samples: number of samples of each validation.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    samples_consumed: int
    validations: int = 0
    validation_samples: int = 0


@dataclass(frozen=True)
class RankFigures(Message):
    """The measurements of a rank in the last seconds."""

    rank: int
    figures: Figures


@dataclass(frozen=True)
class EndsEarly(Message):
    """The workers end before the run's last epoch; a checkpoint covers all of their steps. See `run.early_end`."""

    why: str


@dataclass(frozen=True)
class EpochEnded(Message):
    """The record of an epoch, which `epochs.jsonl` will contain."""

    record: Mapping[str, Any]
