"""The driver's loop: starts worker groups, routes messages, decides what follows failures, and ends."""

import copyreg
import importlib
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydali.errors import SupersededError, TrainingError, UsageError
from raydali.host import start_clock
from raydali.host.cuda_queues import HARDWARE_QUEUES
from raydali.host.interrupts import Interrupt
from raydali.launch import trainer
from raydali.launch.driver.driver_node import DriverNode
from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.group_size import GroupSize
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.pending_resources import PendingResources, cluster_snapshot
from raydali.launch.driver.placement import Cluster, Placement, suffices
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.run_recorder import RunMetrics, RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.launch.job import WorkerTask
from raydali.launch.options import LaunchOptions
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.events import RunFinished, RunInterrupted, RunStopped
from raydali.run.find import newest_step
from raydali.run.folder import RunFolder
from raydali.run.messages import WorkerError
from raydali.text import error_line

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel
    from raydali.train.weights.matching import MatchedWeights

POLL_SECONDS = 0.2
LEAVE_SECONDS = 20
"""How long an interrupted driver waits for the workers' last checkpoint; Kubernetes gives 30 s."""

READ_BY_RAY_TRAIN = "RAY_TRAIN_", "TRAIN_", "RAY_CHDIR_"
"""How the names of the environment variables begin that Ray Train reads in the process of the trainer."""
WORKER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": str(HARDWARE_QUEUES)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is about to train.

    Attributes:
        train, data, samples: see `launcher.Job`.
        weights: what the model starts from, if not from random weights or a checkpoint.
        attempt: the id of this driver's attempt, see `run.attempt`.
    """

    train: Callable[..., None]
    data: Any
    samples: int
    weights: "MatchedWeights | None"
    options: LaunchOptions
    placement: Placement
    cluster: Cluster
    folder: RunFolder
    attempt: str


def pickle_modules_of_torch() -> None:
    """Let a job's file import torch at its top.

    A function that uses the global `torch` and has any attribute `classes` or `ops`, as in `config.classes`, is pickled
    by cloudpickle with the modules `torch.classes` and `torch.ops`, which pickle refuses.
    """
    if torch := sys.modules.get("torch"):
        for module in (torch.classes, torch.ops):
            copyreg.pickle(type(module), lambda module: (importlib.import_module, (module.__name__,)))


def train_in_workers(
    run: Run, console: Console, track: Callable[[Mapping[str, Any]], None], interrupt: Interrupt
) -> None:
    """Train in Ray Train workers until the end; show and record what happens.

    Args:
        run: the job, its folder and its placement.
        console: shows messages.
        track: takes the record of each epoch.
        interrupt: requests the end of the run.

    Raises:
        TrainingError: workers failed more often than `max_failures`, or in a way that would recur, or the driver did.
        UsageError: a worker found that the options cannot be used.
        KeyboardInterrupt: it was interrupted; workers that trained have saved a checkpoint.
    """
    loop = _DriverLoop(run, console, track, interrupt)
    failure = None
    try:
        loop.poll_until_end()
    except SupersededError:
        raise
    except Exception as error:  # of Ray, if one of its processes has died on this node
        failure = driver_error(error, run.folder)
    finally:
        console.close()
    loop.end(failure)


class _DriverLoop:
    """Polls everything that the driver watches."""

    def __init__(
        self, run: Run, console: Console, track: Callable[[Mapping[str, Any]], None], interrupt: Interrupt
    ) -> None:
        from raydali.launch.channel import DriverChannel
        from raydali.launch.driver.deaths import describe_deaths, silence_ray

        silence_ray()
        pickle_modules_of_torch()
        self._folder, self._console, self._interrupt = run.folder, console, interrupt
        self._channel = DriverChannel(f"raydali-{uuid.uuid4().hex}")
        options, placement, cluster = run.options, run.placement, run.cluster
        pending = PendingResources(placement, lambda: cluster_snapshot(cluster), console.print, time.monotonic)
        if cluster.own:
            pending.stop()  # it was given what its workers need
        self._report = report = LiveReport(run.folder, console.warn)
        policy = RestartPolicy(
            options.max_failures, options.storage_timeout, lambda left_out: suffices(placement, cluster, left_out)
        )
        self._groups = WorkerGroups(
            self._channel,
            _training(run),
            {"task": _put_task(run, self._channel)},
            GroupSize(placement),
            policy,
            pending,
            describe_deaths,
            options.start_timeout,
            requester="" if cluster.own else f"raydali-{uuid.uuid4().hex}",
        )
        watch = HangWatch(options.hang_timeout, start_timeout=options.start_timeout)
        recorder = RunRecorder(run.folder, report, RunMetrics(run.folder.name), track, console.warn)
        self._router = EventRouter(self._channel, self._groups, watch, recorder, console)
        # The check is the first: without its processes, calls of Ray may end this process.
        self._polls = [
            cluster.check,
            self._router.dispatch,
            pending.poll,
            report.poll,
            DriverNode(interrupt.request).poll,
        ]

    def poll_until_end(self) -> None:
        """Return once training is over, or must not be started again.

        Raises:
            KeyboardInterrupt: the run was interrupted.
        """
        groups, interrupt = self._groups, self._interrupt
        while not (groups.finished or groups.stop_reason or interrupt.requested()):
            for poll in self._polls:
                poll()
            groups.wait(POLL_SECONDS)
        self._router.dispatch()
        if interrupt.requested() and not groups.finished:
            if groups.training:
                self._wait_for_checkpoint()
            self._router.close(RunInterrupted(why=interrupt.why))
            raise KeyboardInterrupt(resume_hint(self._folder))

    def _wait_for_checkpoint(self) -> None:
        self._console.print(f"{self._interrupt.why}: saving a checkpoint; interrupt again to leave without it")
        self._groups.stop()
        deadline = time.monotonic() + LEAVE_SECONDS
        while not (self._groups.has_left or self._interrupt.again() or self._groups.wait(POLL_SECONDS / 4)):
            if time.monotonic() > deadline:
                self._console.warn(
                    f"the workers did not save a checkpoint within {LEAVE_SECONDS} s: they end without it"
                )
                return
            self._router.dispatch()
        self._router.dispatch()

    def end(self, error: Exception | None) -> None:
        """Record the end. Workers that still run end with this process's Ray.

        Args:
            error: with which the driver failed.

        Raises:
            TrainingError, UsageError: see `train_in_workers`.
        """
        groups = self._groups
        if error is None and groups.stop_reason is not None:
            error = final_error(groups.errors, groups.failure, groups.stop_reason)
        if error is not None:
            self._router.close(RunStopped(error=error_line(error), why=groups.stop_reason))
            raise error
        self._router.close(RunFinished())
        if (said := self._report.beside_published()) is not None:
            self._console.print(said)
        self._console.print(": ".join(filter(None, ["finished", str(self._folder), self._report.last_and_best()])))


def _put_task(run: Run, channel: "DriverChannel") -> Any:  # noqa: ANN401 (a reference)
    """Put the workers' task into Ray's object store."""
    import ray

    task = WorkerTask(
        train=run.train,
        data=ray.put(run.data),
        samples=run.samples,
        weights=ray.put(run.weights),
        options=run.options,
        folder=run.folder,
        attempt=run.attempt,
        marks=start_clock.marks(),
        channel=channel,
    )
    return ray.put(task)


def _training(run: Run) -> trainer.Training:
    """Return what Ray Train needs to know."""
    placement = run.placement
    # Ray Train would pass its own ones on, too: then the workers would get no process that was started for them.
    of_ray_train = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
    polls = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": f"{health_check_seconds(placement.reachable):g}"}
    return trainer.Training(
        name=run.folder.name,
        gpu=placement.gpu,
        cpus=placement.cpus,
        timeout=run.options.group_timeout,
        worker_variables={**polls, **of_ray_train, **WORKER_ENVIRONMENT},
        settings={name: value for name, value in os.environ.items() if name.startswith(READ_BY_RAY_TRAIN)},
    )


def health_check_seconds(workers: int) -> float:
    """Return the interval at which Ray Train's controller polls all workers: at most 400 workers a second."""
    return max(0.25, workers / 400)


def resume_hint(folder: RunFolder) -> str:
    """Describe what an interrupted run can be resumed from."""
    with suppress(OSError):
        if newest_step(folder) is None:
            return (
                "interrupted before the first checkpoint, so nothing is saved: the same command starts from the "
                "beginning"
            )
    return f"interrupted: the same command with --name {folder.name} resumes it"


def driver_error(error: Exception, folder: RunFolder) -> TrainingError:
    """Return the error of a run whose driver failed: Ray died on its node, or a poll raised an unexpected exception."""
    from ray.exceptions import RayError

    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": .")
    if isinstance(error, RayError | ChildProcessError):
        what = f"Ray failed on the driver's node ({text})"
    else:
        frame = [each for each in traceback.extract_tb(error.__traceback__) if "raydali" in each.filename][-1]
        what = f"the driver failed ({text}, {Path(frame.filename).name}:{frame.lineno})"
    return TrainingError(f"{what}: the same command with --name {folder.name} resumes the run")


def final_error(errors: Sequence[WorkerError], failure: str, stop_reason: str) -> Exception:
    """Return the first error that a worker reported, since later ones often only follow from it; else what Ray knows.

    Args:
        errors: see `WorkerGroups`, as the next two.
        failure: the end of the last worker group, as Ray Train describes it.
        stop_reason: why the run must end.
    """
    if not errors:
        return TrainingError(f"{failure} ({stop_reason})")
    first = errors[0]
    if first.usage:
        return UsageError(first.error)
    reason = "" if first.final else f" ({stop_reason})"
    return TrainingError(f"{first.traceback}rank {first.rank}: {first.error}{reason}")
