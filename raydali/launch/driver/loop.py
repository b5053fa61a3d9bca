"""The driver's loop: Ray Train works in a thread; this one routes messages, decides what follows failures, and ends."""

import copyreg
import importlib
import os
import sys
import threading
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
from raydali.launch.driver.autoscaling_coordinator import AutoscalingCoordinatorSync
from raydali.launch.driver.driver_node import DriverNode
from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.pending_resources import PendingResources, cluster_snapshot
from raydali.launch.driver.placement import Cluster, Placement, suffices
from raydali.launch.driver.process_servers import start_processes
from raydali.launch.driver.ray_start import check_processes
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.run_recorder import RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.launch.options import LaunchOptions
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.checkpoint_folders import newest_step
from raydali.run.events import RunFinished, RunInterrupted, RunStopped
from raydali.run.folder import RunFolder
from raydali.run.messages import WorkerError
from raydali.text import error_line

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel
    from raydali.train.weights.matching import MatchedWeights

POLL_SECONDS = 0.2
LEAVE_SECONDS = 20
"""How long an interrupted driver waits for the workers' last checkpoint; Kubernetes gives 30 s."""

WORKER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": str(HARDWARE_QUEUES)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is about to train.

    Attributes:
        train, data, samples: see `launcher.Job`.
        weights: what the model starts from, if not from random weights or a checkpoint.
        attempt: the id of this driver's attempt, see `run.attempt`.
        stale_run_ids: Ray's ids of earlier Ray Train runs of this name, which have ended.
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
    stale_run_ids: frozenset[str]


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
        from raydali.launch.driver.run_metrics import RunMetrics

        silence_ray()
        pickle_modules_of_torch()
        self._folder, self._console, self._interrupt = run.folder, console, interrupt
        self._channel = DriverChannel(f"raydali-{uuid.uuid4().hex}")
        options, placement, cluster = run.options, run.placement, run.cluster
        self._training = _Background(lambda: _train(run, self._channel))
        pending = PendingResources(placement, lambda: cluster_snapshot(cluster), console.print, time.monotonic)
        if cluster.own:
            pending.stop()  # it was given what its workers need
        self._report = report = LiveReport(run.folder, console.warn)
        policy = RestartPolicy(
            options.max_failures, options.storage_timeout, lambda left_out: suffices(placement, cluster, left_out)
        )
        self._groups = WorkerGroups(self._channel, policy, pending, describe_deaths)
        watch = HangWatch(options.hang_timeout, start_timeout=options.start_timeout)
        recorder = RunRecorder(run.folder, report, RunMetrics(run.folder.name), track, console.warn)
        self._router = EventRouter(self._channel, self._groups, watch, recorder, console)
        self._polls = [self._router.dispatch, pending.poll, report.poll, DriverNode(interrupt.request).poll]
        if cluster.own:
            self._polls.insert(0, check_processes)  # first: without them, calls of Ray may end this process
        if placement.is_elastic:
            self._polls.append(AutoscalingCoordinatorSync(set(run.stale_run_ids)).poll)

    def poll_until_end(self) -> None:
        """Return once training is over, or must not be started again.

        Raises:
            KeyboardInterrupt: the run was interrupted.
        """
        ended, interrupt = self._training.ended, self._interrupt
        while not (ended.wait(POLL_SECONDS) or self._groups.stop_reason or interrupt.requested()):
            for poll in self._polls:
                poll()
        self._router.dispatch()
        if interrupt.requested() and not ended.is_set():
            if self._groups.training:
                self._wait_for_checkpoint()
            self._router.close(RunInterrupted(why=interrupt.why))
            raise KeyboardInterrupt(resume_hint(self._folder))

    def _wait_for_checkpoint(self) -> None:
        self._console.print(f"{self._interrupt.why}: saving a checkpoint; interrupt again to leave without it")
        self._channel.stop()
        deadline = time.monotonic() + LEAVE_SECONDS
        ended = self._training.ended
        while not (self._groups.has_left or self._interrupt.again() or ended.wait(POLL_SECONDS / 4)):
            if time.monotonic() > deadline:
                self._console.warn(
                    f"the workers did not save a checkpoint within {LEAVE_SECONDS} s: they end without it"
                )
                return
            self._router.dispatch()
        self._router.dispatch()

    def end(self, error: Exception | None) -> None:
        """Record the end. If Ray Train would go on, the workers end with this process's Ray.

        Args:
            error: with which the driver failed.

        Raises:
            TrainingError, UsageError: see `train_in_workers`.
        """
        groups, outcome = self._groups, self._training.error
        if error is None and (groups.stop_reason is not None or outcome is not None):
            error = final_error(outcome, groups.errors, groups.failure, groups.stop_reason)
        if error is not None:
            self._router.close(RunStopped(error=error_line(error), why=groups.stop_reason))
            raise error
        self._router.close(RunFinished())
        if (said := self._report.beside_published()) is not None:
            self._console.print(said)
        self._console.print(": ".join(filter(None, ["finished", str(self._folder), self._report.last_and_best()])))


def _train(run: Run, channel: "DriverChannel") -> None:
    """Train until Ray Train ends; see `trainer.train`."""
    import ray

    from raydali.launch import trainer
    from raydali.launch.worker.task import WorkerTask

    options, placement = run.options, run.placement
    task = WorkerTask(
        train=run.train,
        data=ray.put(run.data),
        samples=run.samples,
        weights=ray.put(run.weights),
        options=options,
        folder=run.folder,
        attempt=run.attempt,
        marks=start_clock.marks(),
        channel=channel,
    )
    # Ray Train would pass its own ones on, too: then the workers would get no process that was started for them.
    of_ray_train = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
    polls = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": f"{health_check_seconds(placement.reachable):g}"}
    variables = {**polls, **of_ray_train, **WORKER_ENVIRONMENT}
    if not placement.is_elastic:
        start_processes(placement, variables)
    training = trainer.Training(
        name=run.folder.name,
        storage=run.folder.uri_of_storage,
        workers=(placement.minimum, placement.reachable) if placement.is_elastic else placement.minimum,
        gpu=placement.gpu,
        cpus=placement.cpus,
        timeout=options.group_timeout,
        start_timeout=options.start_timeout,
        worker_variables=variables,
    )
    trainer.train(training, ray.put(task), channel)


def health_check_seconds(workers: int) -> float:
    """Return the interval at which Ray Train's controller polls all workers: at most 400 workers a second."""
    return max(0.25, workers / 400)


class _Background:
    """A call on a thread of its own.

    Attributes:
        ended: set when it has returned or raised. The thread's own state cannot be used: after an interrupted `join`
            (Python 3.11), a running thread looks as if it had ended.
        error: what it raised.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), daemon=True, name="fit").start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error
        self.ended.set()


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


def final_error(
    outcome: BaseException | None, errors: Sequence[WorkerError], failure: str, stop_reason: str | None
) -> Exception:
    """Return the first error that a worker reported, since later ones often only follow from it; else what Ray knows.

    Args:
        outcome: the exception of Ray Train; None if it would go on.
        errors: see `WorkerGroups`, as the next two.
        failure: the end of the last worker group, as Ray Train describes it.
        stop_reason: why the run must end; None if it might go on.
    """
    reason = f" ({stop_reason})" if stop_reason else ""
    if not errors:
        text = (str(outcome).strip() or type(outcome).__name__) if outcome is not None else failure
        return TrainingError(text + reason)
    first = errors[0]
    if first.usage:
        return UsageError(first.error)
    return TrainingError(f"{first.traceback}rank {first.rank}: {first.error}{'' if first.final else reason}")
