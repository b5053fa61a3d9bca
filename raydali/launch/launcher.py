"""From a job's config to a finished run: the driver's side."""

import os
import random
import string
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from raydali.data.hardware_queues import HARDWARE_QUEUES
from raydali.errors import StartError, UsageError
from raydali.interrupts import Interrupt
from raydali.launch.attempt import Attempt
from raydali.launch.choices import with_kept
from raydali.launch.cluster import check_own_ray, connect
from raydali.launch.driver_node import DriverNode
from raydali.launch.ear import Ear
from raydali.launch.hangs import HangWatch
from raydali.launch.options import WHERE_SETTINGS, LaunchOptions
from raydali.launch.preflight import Cluster, Placement, place, suffices
from raydali.launch.reservations import Reservations
from raydali.launch.restart_policy import RestartPolicy
from raydali.launch.resume import Earlier, changes, check_unchanged, earlier_run, in_words
from raydali.launch.waiting import Waiting, look
from raydali.measure.host import usable_cores
from raydali.report.console import Console
from raydali.report.html_live import LiveReport
from raydali.report.run_folder import CONFIG, EVENTS, RunFolder
from raydali.report.tracking import tracked

if TYPE_CHECKING:
    from raydali.launch.mailbox import Mailbox

POLL_SECONDS = 0.2
LEAVE_SECONDS = 20
"""How long an interrupted driver waits for the workers' last checkpoint; Kubernetes gives 30 s."""
STREAM_SETTINGS = ("fingerprint", "epochs", "batch_size", "global_batch_size", "seed", "shuffle_block")
"""What a resume must repeat, or the stream would be another."""

WORKER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": str(HARDWARE_QUEUES)}


class TrainingFailed(Exception):
    """The run ended early; the message is the worker's own error. Exit code 1."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What runs.

    Attributes:
        name: what names of runs begin with.
        train: `train(options, data, session)`, called in every worker.
        data: for every worker; put into Ray's object store, so that those of a node share one copy.
        samples, fingerprint: the size of the training set, and a hash of its index.
        unchangeable: settings that a resume must repeat beside the stream's, or the weights would be others.
    """

    name: str
    train: Callable[..., None]
    data: Any
    samples: int
    fingerprint: str
    unchangeable: tuple[str, ...] = ()


def launch(job: Job, options: LaunchOptions, console: Console) -> None:
    """Train as the options say: begin the run of that name, or go on where it stopped.

    Raises:
        UsageError: what is asked cannot be done, or is another run than the earlier one of that name.
        StartError: Ray did not start on this machine.
        TrainingFailed: workers failed more often than `max_failures`, or in a way that would recur.
        KeyboardInterrupt: it was interrupted; a run that was training has left a checkpoint.
    """
    folder = RunFolder(options.storage, options.name or _new_name(job), console.warn)
    options = replace(options, name=folder.name, storage=folder.uri_of_storage)
    earlier = earlier_run(folder, _defaults(options))
    changed: dict[str, tuple[Any, Any]] = {}
    if earlier is not None:
        size = options.global_batch_size or earlier.settings["global_batch_size"]
        options = with_kept(replace(options, global_batch_size=size), earlier.settings)
        settings = _settings(job, options)
        check_unchanged(folder, earlier, settings, STREAM_SETTINGS + job.unchangeable)
        if earlier.finished:
            console.say(f"{folder} is finished: nothing left to do")
            return
        changed = changes(earlier, settings, sorted(settings.keys() - WHERE_SETTINGS))
        for change in in_words(changed):
            console.warn(f"resuming with another setting: {change}")
    check(options, job.samples)
    with _created(folder), connect(options, console.warn) as cluster:
        placement = place(options, cluster)
        if options.global_batch_size is None:
            options = replace(options, global_batch_size=options.batch_size * placement.maximum)
        check(options, job.samples, placement)
        cores = usable_cores()
        if cluster.own and placement.maximum * placement.cpus > cores:
            console.warn(f"{placement.maximum} workers share {cores} cores: good for trying, not for speed")
        _warn_of_idle_workers(options, placement.maximum, console)
        if placement.minimum < placement.maximum and not options.checkpoint_every:
            console.warn(
                f"--workers {options.workers} expects nodes to come and go, and one that is lost costs the steps since "
                f"the newest checkpoint: up to an epoch, without --checkpoint-every STEPS"
            )
        if placement.reachable < placement.maximum:
            console.warn(f"of up to {placement.maximum} workers the cluster ({cluster}) holds {placement.reachable}")
        settings = _settings(job, options)
        attempt = Attempt()
        folder = _begin(folder, attempt, earlier, settings, changed)
        console.say(f"run {folder}: with --name {folder.name}, the same command resumes it")
        left_over = set(earlier.train_runs) if earlier is not None else set()
        try:
            with tracked(folder, options.trackers, settings, console.warn) as track:
                _run(job, options, placement, cluster, folder, attempt, console, track, left_over)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(_left_behind(folder)) from interrupt


def _new_name(job: Job) -> str:
    """With some random characters, since two may begin in one second."""
    return time.strftime(f"{job.name}-%Y%m%d-%H%M%S-") + "".join(
        random.choices(string.ascii_lowercase + string.digits, k=4)
    )


def _defaults(options: LaunchOptions) -> dict[str, Any]:
    """Of all options that have one."""
    return {each.name: each.default for each in fields(options) if each.default is not MISSING}


def _begin(
    folder: RunFolder,
    attempt: Attempt,
    earlier: Earlier | None,
    settings: dict[str, Any],
    changed: dict[str, tuple[Any, Any]],
) -> RunFolder:
    """The run's folder, which is this driver's from now on, with `config.json` as the run goes on.

    Raises:
        UsageError: another driver began a run of this name at the same moment.
    """
    if earlier is None:
        try:
            folder.create_json(CONFIG, settings)
        except FileExistsError as error:
            raise UsageError(
                f"another driver has just begun a run in {folder}: give another --name, or leave it to that driver"
            ) from error
    attempt.take(folder)
    folder = attempt.fenced(folder)
    folder.remove_partial_files()
    if changed:
        folder.append(EVENTS, {"time": round(time.time(), 3), "event": "settings", "changed": changed})
    if earlier is not None and changes(earlier, settings, settings):
        folder.write_json(CONFIG, settings)
    return folder


@contextmanager
def _created(folder: RunFolder) -> Iterator[None]:
    """The run's folder is there; where the start is refused or interrupted while it is empty, it goes again."""
    folder.create()
    try:
        yield
    except (UsageError, StartError, KeyboardInterrupt):
        folder.remove_if_empty()
        raise


def _warn_of_idle_workers(options: LaunchOptions, workers: int, console: Console) -> None:
    assert options.global_batch_size is not None
    batches = options.global_batch_size // options.batch_size
    if batches % workers:
        console.warn(
            f"{workers} workers share the {batches} batches of a step unevenly, and some wait for others: a number "
            f"that divides {batches} leaves none waiting"
        )


def _settings(job: Job, options: LaunchOptions) -> dict[str, Any]:
    return asdict(options) | {"samples": job.samples, "fingerprint": job.fingerprint}


def check(options: LaunchOptions, samples: int, placement: Placement | None = None) -> None:
    """Refuse what cannot be trained: what can be told without a cluster at first, the rest once workers are placed.

    Raises:
        UsageError: naming the values that do not go together, and the remedy.
    """
    if placement is None:
        check_own_ray(options)
        workers = options.worker_range[1] if options.worker_range else 1
    else:
        workers = placement.maximum
    global_batch_size = options.global_batch_size or options.batch_size * workers
    stream = replace(options, global_batch_size=global_batch_size).stream(samples)
    stream.micro_batches_of(0, workers)
    if not options.sync_bn:
        return
    if options.no_gpu or (placement is not None and not placement.gpu):
        raise UsageError("--sync-bn needs GPUs: leave it out, or train on a cluster that has some")
    if options.workers is not None and ":" in options.workers:
        raise UsageError(f"--sync-bn needs a fixed number of workers, not --workers {options.workers}")
    if stream.micro_batches_per_step % workers:
        raise UsageError(
            f"--sync-bn needs the {stream.micro_batches_per_step} micro-batches of a global batch to be a multiple of "
            f"the {workers} workers: lower --workers, or raise --global-batch-size"
        )


def _run(
    job: Job,
    options: LaunchOptions,
    placement: Placement,
    cluster: Cluster,
    folder: RunFolder,
    attempt: Attempt,
    console: Console,
    track: Callable[[Mapping[str, Any]], None],
    left_over: set[str],
) -> None:
    """Train in Ray Train workers until the end, telling the console and `events.jsonl` what happens."""
    import ray
    from ray.train import RunConfig, ScalingConfig

    from raydali.launch.deaths import describe_deaths, silence_ray
    from raydali.launch.mailbox import Mailbox
    from raydali.launch.metrics import RunMetrics
    from raydali.launch.process_group import WorkerProcesses
    from raydali.launch.ray_session import run_worker
    from raydali.launch.scaling import START_TIMEOUT, Trainer

    silence_ray()
    mailbox = Mailbox(f"raydali-{uuid.uuid4().hex}")
    elastic = placement.minimum < placement.reachable
    if elastic:
        # What is free may be taken, or its node dead, by the time that workers are placed: then it is counted anew.
        os.environ.setdefault(START_TIMEOUT, "3")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{health_check_seconds(placement.reachable):g}")
    workers = (placement.minimum, placement.reachable) if elastic else placement.minimum
    trainer = Trainer(
        run_worker,
        mailbox=mailbox,
        train_loop_config={
            "train": job.train,
            "options": options,
            "data": ray.put(job.data),
            "samples": job.samples,
            "folder": folder,
            "driver": attempt.driver,
            "mailbox": mailbox,
        },
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
    waiting = Waiting(placement, lambda: look(cluster.autoscaler, cluster.growth.known), console.say, time.monotonic)
    if cluster.own:
        waiting.over()  # it was given what its workers need
    report = LiveReport(folder, console.warn)
    reservations = Reservations(left_over)
    policy = RestartPolicy(
        options.max_failures, options.storage_timeout, lambda left_out: suffices(placement, cluster, left_out)
    )
    watch = HangWatch(options.hang_timeout, start_timeout=options.start_timeout)
    metrics = RunMetrics(folder.name)
    ear = Ear(mailbox, folder, console, waiting, track, metrics, report, policy, watch, describe_deaths)
    interrupt, driver_node = Interrupt(), DriverNode()
    try:
        with interrupt.on_signals():
            while not (fit.over.wait(POLL_SECONDS) or ear.why or interrupt.requested()):
                ear.listen()
                waiting.poll()
                report.poll()
                if elastic:
                    reservations.poll()
                if draining := driver_node.poll():
                    interrupt.request(draining)
            ear.listen()
            if interrupt.requested() and not fit.over.is_set():
                _leave(ear, mailbox, fit.over, interrupt, console)
                ear.end("interrupt", why=interrupt.why)
                raise KeyboardInterrupt
    finally:
        console.close()
    # Where Ray Train would go on, the workers end with this process's Ray.
    if ear.why is not None or fit.error is not None:
        error = _explained(fit.error, ear.errors, ear.failure, ear.why)
        ear.end("stop", error=str(error).splitlines()[-1], why=ear.why)
        raise error
    ear.end("finish")
    console.say(f"finished: {folder}")


def health_check_seconds(workers: int) -> float:
    """Between two times at which Ray Train's controller asks all workers how they are: 400 of them a second at most."""
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


def _leave(ear: Ear, mailbox: "Mailbox", over: threading.Event, interrupt: Interrupt, console: Console) -> None:
    """Let workers that train make a checkpoint before they end."""
    if not ear.training:
        return
    console.say(f"{interrupt.why}: saving a checkpoint; interrupt again to leave without it")
    mailbox.stop()
    deadline = time.monotonic() + LEAVE_SECONDS
    while not (ear.left or interrupt.again() or over.wait(POLL_SECONDS / 4)):
        if time.monotonic() > deadline:
            console.warn(f"the workers have not saved a checkpoint within {LEAVE_SECONDS} s")
            return
        ear.listen()
    ear.listen()


def _left_behind(folder: RunFolder) -> str:
    """What an interrupted run can go on from, in words."""
    from raydali.launch.checkpoint_store import newest_step

    with suppress(OSError):
        if newest_step(folder) is None:
            return "interrupted before the first checkpoint: nothing was saved, and the same command starts anew"
    return f"interrupted: the same command with --name {folder.name} resumes it"


def _explained(
    outcome: BaseException | None, errors: Sequence[Mapping[str, Any]], failure: str, why: str | None
) -> Exception:
    """The first error that a worker itself had; the others' are often only its echo. Else what Ray knows.

    Args:
        outcome: of Ray Train; None where it would go on.
        errors: what workers of the last group said.
        failure: what Ray Train said of its end; empty for nothing.
        why: why the run ends nevertheless.
    """
    because = f" ({why})" if why else ""
    if not errors:
        text = (str(outcome).strip() or type(outcome).__name__) if outcome is not None else failure
        return TrainingFailed(text + because)
    first = errors[0]
    if first["usage"]:
        return UsageError(first["error"])
    if first["final"]:
        because = ""
    return TrainingFailed(f"{first['traceback']}rank {first['rank']}: {first['error']}{because}")
