"""The faults, with their injection, the observation of their detection, and their repair."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from raydali.host.cluster_processes import send
from raydali.report.console import CONTINUES
from raydali.run.events import GROUP_END_EVENTS
from raydali.training.checkpoint_file import FILE_NAME
from tests.support.chaos.accounting import FaultOutcome, first, reached
from tests.support.chaos.nodes import Nodes
from tests.support.chaos.virtual_hosts import namespaces_unavailable, tmpfs_unavailable
from tests.support.chaos.watched_run import WatchedRun
from tests.support.disks import Disk

CHECKPOINTS_BETWEEN = 2
"""Number of checkpoints between two faults."""
LOSSES = ("failure", "preemption")
"""The events that name lost ranks."""


@dataclass
class FaultContext:
    """The cluster, the run, and the state of the current fault.

    Attributes:
        at: time of the injection, in seconds since 1970.
        node: the node that it affects.
        victims: the ranks that it affects.
        unsaved_before: number of warnings about failed checkpoints before the fault.
    """

    nodes: Nodes
    run: WatchedRun
    disk: Disk
    at: float = 0.0
    node: int = 0
    victims: list[psutil.Process] = field(default_factory=list)
    unsaved_before: int = 0

    def training_nodes(self) -> list[int]:
        """Return the nodes with ranks, except the head."""
        return [number for number in range(1, len(self.nodes.hosts)) if self.nodes.trainers(number)]

    def unsaved(self) -> int:
        """Count the driver's warnings that a checkpoint could not be saved."""
        return self.run.output().count(CONTINUES)


Detection = tuple[float, str]
"""The time when a fault was detected, and the event or sign that detected it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that can be injected into a run.

    Attributes:
        description: what the fault does.
        inject: injects the fault.
        detected: returns the detection, or None if the fault was not detected yet.
        repair: does what an operator would do after the detection.
        stops: whether it costs ranks, so that training stops until a resume.
        resumes_undetected: whether this resume may come before the detection.
        unavailable: returns why the fault cannot be injected on this machine; empty if it can.
    """

    description: str
    inject: Callable[[FaultContext], None]
    detected: Callable[[FaultContext], Detection | None]
    repair: Callable[[FaultContext], None] = lambda _: None
    stops: bool = True
    resumes_undetected: bool = False
    unavailable: Callable[[], str] = lambda: ""


def inject(name: str, context: FaultContext) -> FaultOutcome:
    """Inject a fault, wait until it is detected, repair it, and wait until the run continues.

    Raises:
        CommandError: the run ends, or does not continue.
    """
    fault, run = FAULTS[name], context.run
    before = run.checkpoints()
    context.at, context.unsaved_before = time.time(), context.unsaved()
    run.wait_for("a rank to choose", lambda: _trains(run) and bool(context.nodes.all_trainers()))
    context.victims = [random.choice(context.nodes.all_trainers())]
    fault.inject(context)
    run.wait_for(f"{name} to be noticed", lambda: fault.detected(context) is not None)
    noticed, by = fault.detected(context) or (time.time(), "")
    repaired = time.time()
    fault.repair(context)
    if fault.stops:
        since = context.at if fault.resumes_undetected else noticed
        run.wait_for(f"training to go on after {name}", lambda: first(run.events(), ["resume"], since) is not None)
        row = first(run.events(), ["resume"], since) or {}
        resumed, resumed_at = row["time"], row["step"]
    else:
        run.wait_for("a checkpoint that can be saved again", lambda: run.checkpoints()[0][1] > repaired)
        resumed, resumed_at = run.checkpoints()[0][1], None
    return FaultOutcome(
        fault=name,
        at=context.at,
        step=before[0][0],
        reached=reached(before, context.at),
        noticed=noticed,
        noticed_by=by,
        resumed=resumed,
        resumed_at=resumed_at,
    )


def wait_until_training(context: FaultContext, *, beyond: int, every: int) -> None:
    """Wait for a checkpoint after a step, for a node other than the head to train, and for a while after that."""
    goal, run = beyond + CHECKPOINTS_BETWEEN * every, context.run
    run.wait_for(
        f"a checkpoint at step {goal} or later, while a node other than the head trains",
        lambda: run.committed() >= goal and bool(context.training_nodes()),
    )
    (_, newest), (_, before) = run.checkpoints()[:2]
    time.sleep(max(0.0, newest + random.random() * (newest - before) - time.time()))


def _trains(run: WatchedRun) -> bool:
    """Return whether the newest group has completed a step: one that starts, as after a resize, has 30 minutes."""
    changes = [row["event"] for row in run.events() if row["event"] in (*GROUP_END_EVENTS, "start", "resume")]
    return changes[-1] in ("start", "resume")


# -- Detection


def _event(*names: str) -> Callable[[FaultContext], Detection | None]:
    def detected(context: FaultContext) -> Detection | None:
        row = first(context.run.events(), names, context.at)
        return (row["time"], row["event"]) if row is not None else None

    return detected


_lost = _event(*LOSSES)


def _warned(context: FaultContext) -> Detection | None:
    """Detect the fault in the driver's output: the event cannot be written while the disk is full."""
    return (time.time(), "checkpoint failed") if context.unsaved() > context.unsaved_before else None


def _orphans_gone(context: FaultContext) -> Detection | None:
    """Detect that the ranks of a killed driver have ended."""
    alive = {*context.nodes.all_trainers()} & {*context.victims}
    return None if alive else (time.time(), "its ranks are gone")


# -- Injection and repair


def _kill_node(context: FaultContext) -> None:
    context.node = context.training_nodes()[-1]
    context.nodes.kill(context.node)


def _cut_link(context: FaultContext) -> None:
    context.node = context.training_nodes()[-1]
    context.nodes.hosts[context.node].set_link("down")


def _restore_link(context: FaultContext) -> None:
    """Restore the link after the cluster has given the node up. Its ranks must end then; a new node is started."""
    context.run.wait_for("the node without a link to be given up", lambda: _lost(context) is not None)
    context.nodes.hosts[context.node].set_link("up")
    context.run.wait_for("the cut-off ranks to end", lambda: not context.nodes.trainers(context.node))
    context.nodes.kill(context.node)
    context.nodes.start(context.node)


def _damage_checkpoint(context: FaultContext) -> None:
    trainers = context.nodes.all_trainers()
    send(trainers, signal.SIGSTOP)  # so that no newer checkpoint is saved
    newest, _ = context.run.checkpoints()[0]
    file = Path(context.run.folder.path(f"checkpoint_{newest:09d}/{FILE_NAME}"))
    with file.open("r+b") as contents:
        contents.seek(file.stat().st_size // 2)
        contents.write(b"rubbish" * 64)
    send(trainers, signal.SIGKILL)


def _restart_driver(context: FaultContext) -> None:
    context.victims = context.nodes.all_trainers()
    context.run.kill()
    context.run.start()


FAULTS = {
    "worker": Fault(
        description="SIGKILL to one rank",
        inject=lambda context: send(context.victims, signal.SIGKILL),
        detected=_lost,
    ),
    "node": Fault(
        description="SIGKILL to all processes of a node; a new one is started in its place",
        inject=_kill_node,
        detected=_lost,
        repair=lambda context: context.nodes.start(context.node),
    ),
    "link": Fault(
        description="a node's network link is cut, and restored once the node is given up",
        inject=_cut_link,
        detected=_event("hang", *LOSSES),
        repair=_restore_link,
        unavailable=namespaces_unavailable,
    ),
    "freeze": Fault(
        description="SIGSTOP to one rank",
        inject=lambda context: send(context.victims, signal.SIGSTOP),
        detected=_event("hang"),
    ),
    "disk": Fault(
        description="the disk of the run is full until a checkpoint fails",
        inject=lambda context: context.disk.fill(),
        detected=_warned,
        repair=lambda context: context.disk.clear(),
        stops=False,
        unavailable=tmpfs_unavailable,
    ),
    "corrupt": Fault(
        description="the newest checkpoint is overwritten in part, and all ranks are killed",
        inject=_damage_checkpoint,
        detected=_event("bad checkpoint"),
    ),
    "driver": Fault(
        description="SIGKILL to the driver, and the same command again",
        inject=_restart_driver,
        detected=_orphans_gone,
        resumes_undetected=True,
    ),
}
