"""What is done to a run, how one sees that it was noticed, and how it is mended."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from raydali.commands.chaos.accounting import FaultOutcome, first, reached
from raydali.commands.chaos.nodes import Nodes
from raydali.commands.chaos.run import WatchedRun
from raydali.commands.chaos.virtual_hosts import Disk, why_no_cables, why_no_disk
from raydali.host.processes import send
from raydali.train.checkpoint_file import FILE_NAME

CHECKPOINTS_BETWEEN = 2
"""Behind the last fault, before the next one comes."""
WAY_TO_THE_NEXT = 0.6
"""Of the way from the newest checkpoint to the next one, where faults come."""
NODE_ENDS_SECONDS = 60.0
"""For a node to find out that it was given up, once its cable is in again."""
_UNSAVED = "could not be saved"


@dataclass
class Stage:
    """Where a run trains, and what is being done to it.

    Attributes:
        at: when the fault was inflicted, in seconds since 1970.
        number: the node that it is done to.
        victims: the ranks that it is done to.
        said: how often the driver had said before that a checkpoint could not be saved.
    """

    nodes: Nodes
    run: WatchedRun
    disk: Disk
    at: float = 0.0
    number: int = 0
    victims: list[psutil.Process] = field(default_factory=list)
    said: int = 0

    def training_nodes(self) -> list[int]:
        """Those that train, but for the head."""
        return [number for number in range(1, len(self.nodes.hosts)) if self.nodes.trainers(number)]

    def unsaved(self) -> int:
        """How often the driver has said that a checkpoint could not be saved."""
        return self.run.said().count(_UNSAVED)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        what: in words.
        inflict: does it.
        noticed: when it was noticed and by what; None as long as it was not.
        mend: what an operator would do then.
        stops: whether training stops until a resume.
        resumes_unnoticed: whether that resume may come before the fault is noticed.
        why_not: why it cannot be inflicted on this machine; empty where it can.
    """

    what: str
    inflict: Callable[[Stage], None]
    noticed: Callable[[Stage], tuple[float, str] | None]
    mend: Callable[[Stage], None] = lambda stage: None
    stops: bool = True
    resumes_unnoticed: bool = False
    why_not: Callable[[], str] = lambda: ""


def suffer(name: str, stage: Stage) -> FaultOutcome:
    """Inflict a fault, wait until it is noticed, mend it, and wait until the run goes on.

    Raises:
        CommandFailed: the run ends, or does not go on.
    """
    fault, run = FAULTS[name], stage.run
    before = run.checkpoints()
    stage.at, stage.victims, stage.said = time.time(), stage.nodes.all_trainers()[-1:], stage.unsaved()
    fault.inflict(stage)
    run.wait_for(f"{name} to be noticed", lambda: fault.noticed(stage) is not None)
    noticed, by = fault.noticed(stage) or (time.time(), "")
    mended = time.time()
    fault.mend(stage)
    if fault.stops:
        since = stage.at if fault.resumes_unnoticed else noticed
        run.wait_for(f"training to go on after {name}", lambda: first(run.events(), ["resume"], since) is not None)
        row = first(run.events(), ["resume"], since) or {}
        resumed, resumed_at = row["time"], row["step"]
    else:
        run.wait_for("a checkpoint that can be saved again", lambda: run.checkpoints()[0][1] > mended)
        resumed, resumed_at = run.checkpoints()[0][1], None
    return FaultOutcome(
        fault=name,
        at=stage.at,
        step=before[0][0],
        reached=reached(before, stage.at),
        noticed=noticed,
        noticed_by=by,
        resumed=resumed,
        resumed_at=resumed_at,
    )


def wait_until_training(run: WatchedRun, stage: Stage, *, beyond: int, every: int) -> None:
    """Until checkpoints are made behind a step, a node other than the head trains, and the next checkpoint is near."""
    goal = beyond + CHECKPOINTS_BETWEEN * every
    run.wait_for(
        f"a checkpoint at step {goal} or later, while a node beside the head trains",
        lambda: run.committed() >= goal and bool(stage.training_nodes()),
    )
    (_, newest), (_, before) = run.checkpoints()[:2]
    time.sleep(max(0.0, newest + WAY_TO_THE_NEXT * (newest - before) - time.time()))


# -- How it is noticed


def _event(*names: str) -> Callable[[Stage], tuple[float, str] | None]:
    def noticed(stage: Stage) -> tuple[float, str] | None:
        row = first(stage.run.events(), names, stage.at)
        return (row["time"], row["event"]) if row is not None else None

    return noticed


def _warned(stage: Stage) -> tuple[float, str] | None:
    """By the console: the event cannot be written while the disk is full."""
    return (time.time(), "checkpoint failed") if stage.unsaved() > stage.said else None


def _orphans_gone(stage: Stage) -> tuple[float, str] | None:
    """The ranks of a killed driver have ended."""
    alive = {*stage.nodes.all_trainers()} & {*stage.victims}
    return None if alive else (time.time(), "its ranks are gone")


# -- What is done


def _kill_node(stage: Stage) -> None:
    stage.number = stage.training_nodes()[-1]
    stage.nodes.kill(stage.number)


def _cut_link(stage: Stage) -> None:
    stage.number = stage.training_nodes()[-1]
    stage.nodes.hosts[stage.number].link("down")


def _heal_link(stage: Stage) -> None:
    """Once the cluster has given the node up; Ray ends it then, so a new one is started."""
    given_up = _event("failure", "preemption")
    stage.run.wait_for("the node without a link to be given up", lambda: given_up(stage) is not None)
    stage.nodes.hosts[stage.number].link("up")
    stage.nodes.wait_until_gone(stage.number, NODE_ENDS_SECONDS)
    stage.nodes.kill(stage.number)
    stage.nodes.start(stage.number)


def _damage_checkpoint(stage: Stage) -> None:
    trainers = stage.nodes.all_trainers()
    send(trainers, signal.SIGSTOP)  # so that it stays the newest
    newest, _ = stage.run.checkpoints()[0]
    file = Path(stage.run.folder.path(f"checkpoint_{newest:09d}/{FILE_NAME}"))
    with file.open("r+b") as contents:
        contents.seek(file.stat().st_size // 2)
        contents.write(b"rubbish" * 64)
    send(trainers, signal.SIGKILL)


def _restart_driver(stage: Stage) -> None:
    stage.victims = stage.nodes.all_trainers()
    stage.run.kill()
    stage.run.start()


FAULTS = {
    "worker": Fault(
        what="SIGKILL to one rank",
        inflict=lambda stage: send(stage.victims, signal.SIGKILL),
        noticed=_event("failure"),
    ),
    "node": Fault(
        what="SIGKILL to all processes of a node; a new one is started in its place",
        inflict=_kill_node,
        noticed=_event("failure", "preemption"),
        mend=lambda stage: stage.nodes.start(stage.number),
    ),
    "link": Fault(
        what="a node's cable is pulled out, and put in again once the node is given up",
        inflict=_cut_link,
        noticed=_event("hang", "failure", "preemption"),
        mend=_heal_link,
        why_not=why_no_cables,
    ),
    "freeze": Fault(
        what="SIGSTOP to one rank",
        inflict=lambda stage: send(stage.victims, signal.SIGSTOP),
        noticed=_event("hang"),
    ),
    "disk": Fault(
        what="the disk of the run is full until a checkpoint fails",
        inflict=lambda stage: stage.disk.fill(),
        noticed=_warned,
        mend=lambda stage: stage.disk.clear(),
        stops=False,
        why_not=why_no_disk,
    ),
    "corrupt": Fault(
        what="the newest checkpoint is overwritten in part, and all ranks are killed",
        inflict=_damage_checkpoint,
        noticed=_event("bad checkpoint"),
    ),
    "driver": Fault(
        what="SIGKILL to the driver, and the same command again",
        inflict=_restart_driver,
        noticed=_orphans_gone,
        resumes_unnoticed=True,
    ),
}
