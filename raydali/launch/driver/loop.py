"""The driver's loop: Ray Train works in a thread; this one listens, decides what follows failures, and ends the run."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raydali.errors import TrainingFailed, UsageError
from raydali.host.cuda_queues import HARDWARE_QUEUES
from raydali.host.interrupts import Interrupt
from raydali.launch.driver.autoscaling_coordinator import AutoscalingCoordinatorSync
from raydali.launch.driver.driver_node import DriverNode
from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.pending_resources import PendingResources, look
from raydali.launch.driver.placement import Cluster, Placement, suffices
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.run_recorder import RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.launch.options import LaunchOptions
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.events import RunFinished, RunInterrupted, RunStopped, WorkerError
from raydali.run.folder import RunFolder

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel

POLL_SECONDS = 0.2
LEAVE_SECONDS = 20
"""How long an interrupted driver waits for the workers' last checkpoint; Kubernetes gives 30 s."""

WORKER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": str(HARDWARE_QUEUES)}


def train_in_workers(
    work: Mapping[str, Any],
    options: LaunchOptions,
    placement: Placement,
    cluster: Cluster,
    folder: RunFolder,
    console: Console,
    track: Callable[[Mapping[str, Any]], None],
    left_over: set[str],
    interrupt: Interrupt,
) -> None:
    """Train in Ray Train workers until the end, telling the console and `events.jsonl` what happens.

    Args:
        work: what each worker is handed beside the options and the folder; see `ray_session.run_worker`.
        track: takes the record of each epoch.
        left_over: Ray's ids of earlier Ray Train runs of this name, which are over.
        interrupt: what asks the run to end.

    Raises:
        TrainingFailed: workers failed more often than `max_failures`, or in a way that would recur.
        UsageError: what a worker found that cannot be done as asked.
        KeyboardInterrupt: it was interrupted; workers that trained have left a checkpoint.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig

    from raydali.launch.channel import DriverChannel
    from raydali.launch.controller.scaling import START_TIMEOUT, Trainer
    from raydali.launch.driver.deaths import describe_deaths, silence_ray
    from raydali.launch.driver.run_metrics import RunMetrics
    from raydali.launch.worker.process_group import WorkerProcesses
    from raydali.launch.worker.ray_session import run_worker

    silence_ray()
    channel = DriverChannel(f"raydali-{uuid.uuid4().hex}")
    elastic = placement.minimum < placement.reachable
    if elastic:
        # What is free may be taken, or its node dead, by the time that workers are placed: then it is counted anew.
        os.environ.setdefault(START_TIMEOUT, "3")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{health_check_seconds(placement.reachable):g}")
    workers = (placement.minimum, placement.reachable) if elastic else placement.minimum
    trainer = Trainer(
        run_worker,
        channel=channel,
        train_loop_config=dict(work, options=options, folder=folder, channel=channel, data=ray.put(work["data"])),
        torch_config=WorkerProcesses(backend="gloo", timeout_s=int(options.group_timeout.total_seconds())),
        scaling_config=ScalingConfig(
            num_workers=workers,  # type: ignore[arg-type]  # the stub knows no (min, max)
            use_gpu=placement.gpu,
            resources_per_worker={"CPU": placement.cpus} | ({"GPU": 1} if placement.gpu else {}),
        ),
        run_config=RunConfig(
            name=folder.name,
            storage_path=folder.uri_of_storage,
            worker_runtime_env={"env_vars": WORKER_ENVIRONMENT},  # type: ignore[call-arg]  # nor this
        ),
    )
    fit = _Background(trainer.fit)
    waiting = PendingResources(
        placement, lambda: look(cluster.autoscaler, cluster.growth.known), console.say, time.monotonic
    )
    if cluster.own:
        waiting.over()  # it was given what its workers need
    report = LiveReport(folder, console.warn)
    reservations = AutoscalingCoordinatorSync(left_over)
    policy = RestartPolicy(
        options.max_failures, options.storage_timeout, lambda left_out: suffices(placement, cluster, left_out)
    )
    watch = HangWatch(options.hang_timeout, start_timeout=options.start_timeout)
    groups = WorkerGroups(channel, policy, waiting, describe_deaths)
    recorder = RunRecorder(folder, report, RunMetrics(folder.name), track, console.warn)
    router = EventRouter(channel, groups, watch, recorder, console)
    driver_node = DriverNode()
    try:
        while not (fit.over.wait(POLL_SECONDS) or groups.stop_reason or interrupt.requested()):
            router.dispatch()
            waiting.poll()
            report.poll()
            if elastic:
                reservations.poll()
            if draining := driver_node.poll():
                interrupt.request(draining)
        router.dispatch()
        if interrupt.requested() and not fit.over.is_set():
            _leave(router, groups, channel, fit.over, interrupt, console)
            router.close(RunInterrupted(why=interrupt.why))
            raise KeyboardInterrupt(left_behind(folder))
    finally:
        console.close()
    # Where Ray Train would go on, the workers end with this process's Ray.
    if groups.stop_reason is not None or fit.error is not None:
        error = explained(fit.error, groups.errors, groups.failure, groups.stop_reason)
        router.close(RunStopped(error=str(error).splitlines()[-1], why=groups.stop_reason))
        raise error
    router.close(RunFinished())
    console.say(f"finished: {folder}")


def health_check_seconds(workers: int) -> float:
    """Return the seconds between two polls of all workers by Ray Train's controller: 400 workers a second at most."""
    return max(0.25, workers / 400)


class _Background:
    """A call on a thread of its own.

    Attributes:
        over: set when it has returned or raised. Not the thread's own word: an interrupted `join` (Python 3.11) leaves
            a thread that runs looking like one that has ended.
        error: what it raised.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), daemon=True, name="fit").start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error
        self.over.set()


def _leave(
    router: EventRouter,
    groups: WorkerGroups,
    channel: "DriverChannel",
    over: threading.Event,
    interrupt: Interrupt,
    console: Console,
) -> None:
    """Let workers that train save a checkpoint before they end."""
    if not groups.training:
        return
    console.say(f"{interrupt.why}: saving a checkpoint; interrupt again to leave without it")
    channel.stop()
    deadline = time.monotonic() + LEAVE_SECONDS
    while not (groups.has_left or interrupt.again() or over.wait(POLL_SECONDS / 4)):
        if time.monotonic() > deadline:
            console.warn(f"the workers have not saved a checkpoint within {LEAVE_SECONDS} s")
            return
        router.dispatch()
    router.dispatch()


def left_behind(folder: RunFolder) -> str:
    """Describe what an interrupted run can go on from."""
    from raydali.run.checkpoints import newest_step

    with suppress(OSError):
        if newest_step(folder) is None:
            return "interrupted before the first checkpoint: nothing was saved, and the same command starts anew"
    return f"interrupted: the same command with --name {folder.name} resumes it"


def explained(outcome: BaseException | None, errors: Sequence[WorkerError], failure: str, why: str | None) -> Exception:
    """Return the first error that a worker reported, since later ones often only follow from it; else what Ray knows.

    Args:
        outcome: of Ray Train; None where it would go on.
        errors, failure, why: see `WorkerGroups`: `errors`, `failure`, `stop_reason`.
    """
    because = f" ({why})" if why else ""
    if not errors:
        text = (str(outcome).strip() or type(outcome).__name__) if outcome is not None else failure
        return TrainingFailed(text + because)
    first = errors[0]
    if first.usage:
        return UsageError(first.error)
    if first.final:
        because = ""
    return TrainingFailed(f"{first.traceback}rank {first.rank}: {first.error}{because}")
