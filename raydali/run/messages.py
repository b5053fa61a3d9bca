"""Messages to the driver that are not recorded; run/events.py has those that are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydali.measure.records import Figures

HEARTBEAT_SECONDS = 2.0
"""Interval between two heartbeats of a worker."""
MORE_WARNINGS = "there are more warnings; Ray's logs of the workers have them"
"""Replaces the warnings beyond a limit."""


class Message:
    """A message to the driver."""


@dataclass(frozen=True, kw_only=True)
class WorkerMessage(Message):
    """A message of which the driver must know the worker group: it ignores those of groups that have ended.

    Attributes:
        group: an id that the workers of one group share.
    """

    rank: int
    group: str


@dataclass(frozen=True, kw_only=True)
class Heartbeat(WorkerMessage):
    """The progress of a rank, sent every `HEARTBEAT_SECONDS`.

    Attributes:
        node, node_id, pid, started: where its process runs; see `host.processes.start_ticks`.
        count: batches taken so far, validation included, and calls that were retried.
        progress: completed steps, plus 0.5 once the next step's batch has arrived; comparable across ranks.
        stack: of the training thread, once it has made no progress for a while.
        waits: whether it waits for other ranks there.
    """

    node: str
    node_id: str
    pid: int
    started: int | None
    count: int
    progress: float
    stack: str | None
    waits: bool


@dataclass(frozen=True, kw_only=True)
class HeartbeatEnded(WorkerMessage):
    """A rank has finished; it sends no more heartbeats."""


@dataclass(frozen=True, kw_only=True)
class WorkerError(WorkerMessage):
    """The exception that ended a worker.

    Attributes:
        step: the last one that the rank completed; 0 before its group's first one.
        traceback: only the frames outside libraries; empty for errors of our own, which explain themselves.
        usage: whether it is a UsageError.
        final: whether a restart would end in the same way.
        storage: whether it passes once the storage answers.
        node_fault: whether other nodes do not have it.
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
    """A warning that code in a worker gave by `warnings` or `logging`; the driver merges equal ones."""

    rank: int
    text: str


@dataclass(frozen=True)
class Placed(Message):
    """A group of fewer workers than the maximum is about to start, for lack of room."""

    workers: int
    maximum: int


@dataclass(frozen=True, kw_only=True)
class Progress(Message):
    """The progress of training, from rank 0.

    Attributes:
        step: completed ones of the run's `steps`.
        epoch: the current one, of `epochs`.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    samples_consumed: int


@dataclass(frozen=True)
class RankFigures(Message):
    """The measurements of a rank in the last seconds."""

    rank: int
    figures: Figures


@dataclass(frozen=True)
class EpochEnded(Message):
    """The record of an epoch, as `epochs.jsonl` will hold it."""

    record: Mapping[str, Any]
