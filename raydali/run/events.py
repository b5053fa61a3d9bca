"""The events of a run, which the driver records in `events.jsonl`. Most are messages to it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from raydali.run.messages import Message

END_EVENTS = ("finish", "early end", "stop", "interrupt")
"""The events with which a driver ends."""
GROUP_END_EVENTS = ("failure", "preemption", "resize")
"""The events with which a worker group ends early. Another group starts unless the driver ends."""
Notice = Literal["preemption", "stop", "resize", "short"]
"""Why workers leave between two steps, after a checkpoint; "short": the next step closes an epoch of a short run."""
WorkerAddress = tuple[str, int]
"""Node id and process id of a worker."""


@dataclass(frozen=True, kw_only=True)
class Event(Message):
    """A message that is recorded as a row of `events.jsonl`.

    Attributes:
        event: the event's name in the row.
        _unrecorded, _optional: facts that the row lacks, and facts that it lacks if they are None or False.
        seconds: time since the driver began to listen, added by the driver; None for the driver's own events.
    """

    event: ClassVar[str]
    _unrecorded: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[tuple[str, ...]] = ()
    seconds: float | None = None

    def row(self) -> dict[str, Any]:
        """Return the row without the time, which the driver adds."""
        lacking = [*self._unrecorded, *(name for name in self._optional if getattr(self, name) in (None, False))]
        facts = {name: value for name, value in asdict(self).items() if name not in lacking}
        seconds = facts.pop("seconds")
        return {"event": self.event, **facts} | ({} if seconds is None else {"seconds": seconds})


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A worker group has completed its first step.

    Attributes:
        step: the step at which the group began.
        versions, nodes: see `launch.worker.run_worker.environment`.
        parameters: number of the model's parameters.
        command: the driver's command line; added by the driver.
        train_run: Ray Train's own id of the run.
        phases: seconds of each phase from the command, or a worker's start, to the end of the first step, by its name.
    """

    event = "start"
    step: int
    steps: int
    world_size: int
    device: str
    versions: Mapping[str, str | None] = field(default_factory=dict)
    nodes: Sequence[Mapping[str, Any]] = ()
    parameters: int = 0
    command: str = ""
    train_run: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resumed(Started):
    """A worker group has completed its first step after a checkpoint."""

    event = "resume"


@dataclass(frozen=True, kw_only=True)
class OptionsChosen(Event):
    """Options that were left open were chosen for the hardware of the workers."""

    event = "chosen"
    options: Mapping[str, Any]

    def row(self) -> dict[str, Any]:
        """Return the row, which has one column for each chosen option."""
        row = super().row()
        return {"event": self.event, **row.pop("options"), **row}


@dataclass(frozen=True, kw_only=True)
class Rehearsed(Event):
    """The warm-up before the first step is complete.

    Attributes:
        ceiling_images_per_second: the ceiling of all ranks together; None if it was not measured.
    """

    event = "rehearsal"
    ceiling_images_per_second: float | None
    rehearsal_seconds: float


@dataclass(frozen=True, kw_only=True)
class CeilingMeasured(Rehearsed):
    """The ceiling was measured again after an epoch, or for the image size of the next one."""

    event = "ceiling"


@dataclass(frozen=True, kw_only=True)
class SizesRehearsed(Event):
    """The warm-up of a short run for all image sizes is complete.

    Attributes:
        costs: the time of a step in each epoch of the run, as a multiple of a step's time in the first one.
    """

    event = "sizes"
    costs: list[float]


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event):
    """A broken sample was found.

    Attributes:
        of: "training" or "validation", with a number for further validation sets.
        id, path, reason, replaced_by: see `data.broken.quarantine.BrokenSample`.
    """

    event = "quarantine"
    of: str
    id: int
    path: str
    reason: str
    replaced_by: int | None


@dataclass(frozen=True, kw_only=True)
class BadLoss(Event):
    """A step has a bad loss or gradient, see `training.bad_losses`.

    Attributes:
        why: what is bad, such as "its loss is nan".
        loss, gradient_norm: of its global batch; the norm is None if it was not computed.
        left_out: whether the step was taken back.
        checkpoint: the step of the newest checkpoint before it, which is kept; 0: there is none.
        command: shows the step again.
    """

    event = "bad loss"
    step: int
    why: str
    loss: float
    gradient_norm: float | None
    left_out: bool
    checkpoint: int
    command: str


@dataclass(frozen=True, kw_only=True)
class StorageRetried(Event):
    """A storage of samples did not answer for a while, and then answered again."""

    event = "storage retry"
    path: str
    reason: str
    waited_seconds: float
    ranks: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class FirstCheckpoint(Event):
    """The first checkpoint of the run is complete: from now on, a run without one has lost it."""

    event = "checkpoint"
    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be saved; training continues."""

    event = "checkpoint failed"
    step: int
    path: str
    reason: str
    in_a_row: int


@dataclass(frozen=True, kw_only=True)
class CheckpointRefused(Event):
    """A checkpoint cannot be used; the previous one is tried."""

    event = "bad checkpoint"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RanksDiffer(Event):
    """Ranks have different weights or momenta, so that no checkpoint of them is saved.

    Attributes:
        step: number of completed steps.
        checksums, ranks: of each rank its checksum, and its node and device in words.
        odd: the ranks that are wrong; empty if nothing tells which.
        recomputed: whether only computing the steps again has told which are.
        text: the event in words.
    """

    event = "ranks differ"
    _optional = ("recomputed",)
    step: int
    checksums: Sequence[int]
    ranks: Sequence[str]
    odd: Sequence[int]
    recomputed: bool = False
    text: str


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The workers are about to leave; a checkpoint covers every step up to this one."""

    event = "left"
    notice: Notice
    step: int


@dataclass(frozen=True, kw_only=True)
class GroupEnded(Event):
    """A worker group ended early."""


@dataclass(frozen=True, kw_only=True)
class Failure(GroupEnded):
    """Workers of a group failed.

    Attributes:
        ranks, error: the ranks that ended with an error, and the error as Ray Train describes it.
        killed: the ranks whose process died.
        starting: whether the group failed before its workers ran.
        places: node and process id of each rank.
        step, pause, cause, nodes, left_out: added by the driver: the last completed step that it knows, and its
            decision, see `launch.driver.restart_policy`. Nodes are given by the first 8 characters of their ids.
    """

    event = "failure"
    _unrecorded, _optional = ("places",), ("starting",)
    ranks: Sequence[int]
    killed: Sequence[int]
    error: str
    starting: bool = False
    places: Mapping[int, WorkerAddress] = field(default_factory=dict)
    step: int = 0
    pause: float = 0.0
    cause: str | None = None
    nodes: Sequence[str] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Preemption(GroupEnded):
    """Nodes were taken away, or the workers left after a notice of preemption.

    Attributes:
        killed, places: see `Failure`; None if the group ended before Ray Train shut it down.
    """

    event = "preemption"
    _optional = ("killed", "places")
    ranks: Sequence[int]
    killed: Sequence[int] | None = None
    places: Mapping[int, WorkerAddress] | None = None
    error: str


@dataclass(frozen=True, kw_only=True)
class Resize(GroupEnded):
    """The workers left for a group of another size."""

    event = "resize"
    workers: int


@dataclass(frozen=True, kw_only=True)
class StuckRank:
    """A rank that holds up the run.

    Attributes:
        node, node_id, pid, started: identify its process; see `Heartbeat`.
        frozen: whether its heartbeats have stopped.
        stack: stack trace of its training thread; None if it sent none.
    """

    rank: int
    node: str
    node_id: str
    pid: int
    started: int | None
    frozen: bool
    stack: str | None


@dataclass(frozen=True, kw_only=True)
class Hang(Event):
    """The run has made no progress for `--hang-timeout`, or has not started within `--start-timeout`."""

    event = "hang"
    starting: bool
    ranks: Sequence[StuckRank]


@dataclass(frozen=True, kw_only=True)
class SettingsChanged(Event):
    """A resume changed settings; their old and new values by name."""

    event = "settings"
    changed: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The driver ends: the run is complete."""

    event = "finish"


@dataclass(frozen=True, kw_only=True)
class RunEndedEarly(RunFinished):
    """The driver ends before the run's last epoch, as `--patience` or `--stop-after` asks: see `run.early_end`."""

    event = "early end"
    why: str


@dataclass(frozen=True, kw_only=True)
class RunStopped(Event):
    """The driver ends with an error.

    Attributes:
        why: why the driver did not restart the workers; None if Ray Train ended.
    """

    event = "stop"
    error: str
    why: str | None


@dataclass(frozen=True, kw_only=True)
class RunInterrupted(Event):
    """The driver was asked to end."""

    event = "interrupt"
    why: str
