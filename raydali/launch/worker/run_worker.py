"""The training function's interface to the launcher, inside a Ray Train worker."""

import time
import traceback
from dataclasses import replace
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.v2._internal.execution.context import get_train_context  # the public API waits for all ranks

from raydali.data.load.loader import Loader
from raydali.data.read.reading import retries
from raydali.data.stream.stream import Stream
from raydali.errors import NodeError, RaydaliError, StorageAway, UsageError
from raydali.host import start_clock
from raydali.host.checks import failed_checks
from raydali.host.facts import GpuEnergy, kernel_sees_gpu
from raydali.launch.channel import Interrupted
from raydali.launch.job import WorkerTask
from raydali.launch.worker.environment import environment, resolve_on_hardware, worker_environment
from raydali.launch.worker.heartbeat import HeartbeatThread
from raydali.launch.worker.log_forwarding import forwarded_warnings
from raydali.launch.worker.rank_metrics import RankMetrics
from raydali.launch.worker.session import Cursor, Session
from raydali.launch.worker.shared_cache import shared_cache
from raydali.measure.records import Figures
from raydali.run.attempt import Attempt
from raydali.run.events import Notice, Resumed, Started
from raydali.run.folder import RunFolder
from raydali.run.ledger import group_id
from raydali.run.messages import ForwardedWarning, Message, Progress, RankFigures, WorkerError
from raydali.text import plural
from raydali.training.weights.matching import MatchedWeights
from raydali.training.worker import Worker

PROGRESS_SECONDS = 0.5
"""Interval at which rank 0 sends its progress to the driver, and asks for the driver's notice."""


class RaySession(Session):
    """The Session inside a Ray Train worker.

    Ray Train's checkpoints are not used: Ray Train ends a run if it cannot rewrite its record of them.
    """

    def __init__(self, task: WorkerTask) -> None:
        start_clock.mark("worker start")
        context = ray.get_runtime_context()
        cpus, node = int(context.get_assigned_resources().get("CPU", 1)), context.get_node_id()[:8]
        self._channel, self._weights = task.channel, task.weights
        folder = replace(task.folder, warn=self.warn)
        self.worker = worker = Worker.join(_device(), cpus=cpus, node=node, timeout=task.options.group_timeout)
        attempt = self._attempt(task.attempt, folder)
        start_clock.mark("process group")
        self._environment = environment(worker.gather(worker_environment(worker)))
        if attempt.group == 1:
            start_clock.join(task.marks)
        super().__init__(worker, attempt.fenced(folder), task.options.kept_steps(task.samples))
        self._metrics = RankMetrics(folder.name, worker.rank, worker.device)
        self._taken, self._last_progress = 0, 0.0
        self._driver_notice: Notice | None = None

    def _attempt(self, driver: str, folder: RunFolder) -> Attempt:
        """Return this worker group's attempt, after rank 0 has taken the folder over for it."""
        number = 0
        if self.worker.rank == 0:
            number = self._channel.next_group()
            with folder.must_answer():
                Attempt(driver, number).take(folder)
        return Attempt(driver, self.worker.from_first(number))

    def starting_weights(self) -> MatchedWeights | None:
        """See this method of Session."""
        return ray.get(self._weights)

    def emit(self, message: Message) -> None:
        """See this method of Session."""
        self._channel.post(message)

    def report_start(self, *, steps: int) -> None:
        """See this method of Session."""
        if self.worker.rank == 0:
            started = Resumed if self.cursor.start else Started
            self.emit(
                started(
                    step=self.cursor.start,
                    steps=steps,
                    world_size=self.worker.world_size,
                    device=self.worker.device.type,
                    **self._environment,
                    parameters=self.parameters,
                    train_run=get_train_context().train_run_context.run_id,
                    phases=start_clock.phases(),
                )
            )

    def report_progress(self, stream: Stream) -> None:
        """See this method of Session."""
        self._taken, now = Loader.batches_taken, time.monotonic()
        if self.worker.rank == 0 and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress, step = now, self.cursor.done
            epoch = stream.epoch_of(step - 1)
            self.emit(
                Progress(
                    step=step,
                    steps=stream.steps,
                    epoch=epoch,
                    epochs=stream.epochs,
                    samples_consumed=stream.state(step)["samples_consumed"],
                    validations=sum(map(self.validates, range(epoch, stream.epochs))),
                    validation_samples=self.validation_samples,
                )
            )
            self._driver_notice = self._channel.notice()

    def progress(self) -> float:
        """Return the progress of this rank; see HeartbeatThread."""
        return self.cursor.done + (0.5 if Loader.batches_taken > self._taken else 0.0)

    def notice(self) -> Notice | None:
        """See this method of Session."""
        if (error := self.checkpoints.error) is not None:
            raise error
        if get_train_context().preemption_context.preemption_info is not None:
            return "preemption"
        return self._driver_notice

    def publish(self, figures: Figures) -> None:
        """Publish figures to Ray's metrics, which Prometheus collects, and to the driver's display."""
        self._metrics.publish(figures)
        self.emit(RankFigures(self.worker.rank, figures))


def _device() -> torch.device:
    """Return the device that Ray Train gave this worker; the CPU if GPUs are declared but none exists.

    Raises:
        RuntimeError: there is a GPU that CUDA does not find, for example because it has failed.
    """
    device: torch.device = ray.train.torch.get_device()
    if device.type != "cuda" or torch.cuda.is_available():
        return device
    if kernel_sees_gpu():
        raise RuntimeError("CUDA finds no GPU in this process, though the node has one: see `nvidia-smi` there")
    return torch.device("cpu")


def run_worker(config: dict[str, Any]) -> None:
    """Run the job's training function in a Ray Train worker. Report an error to the driver before raising it.

    Args:
        config: the reference to the WorkerTask as "task", and the number of the worker group as "group".
    """
    task: WorkerTask = ray.get(config["task"])
    channel, options, group = task.channel, task.options, config["group"]
    rank, context = ray.train.get_context().get_world_rank(), ray.get_runtime_context()
    session: RaySession | None = None
    energy: GpuEnergy | None = None
    heartbeat = HeartbeatThread(  # the start of the session may hang, too
        channel.post,
        lambda: Loader.batches_taken + retries(),
        lambda: session.progress() if session is not None else 0.0,
        min(timeout / 2 or float("inf") for timeout in (options.hang_timeout, options.start_timeout)),
        joules=lambda: energy.joules() if energy is not None else None,
        node=context.get_node_id()[:8],
        rank=rank,
        group=group,
        node_id=context.get_node_id(),
    )
    try:
        session = RaySession(task)
        session.group, session.short_seconds = group_id(task.attempt, group), task.short_seconds
        if session.worker.device.type == "cuda":
            energy = GpuEnergy(str(torch.cuda.get_device_properties(session.worker.device).uuid))
        if session.worker.device.type == "cuda" and ray.train.get_context().get_local_rank() == 0:
            for text in failed_checks():
                session.warn(text)
        with forwarded_warnings(lambda text: channel.post(ForwardedWarning(rank, text))):
            data = ray.get(task.data)
            address = ray.util.get_node_ip_address()
            with shared_cache(options.cache, session.worker, address, (data.train, data.val), session.warn):
                task.train(resolve_on_hardware(options, session, samples=task.samples), data, session)
            if session.steps_left:
                steps = plural(session.steps_left, "step")
                raise UsageError(f"the job's train function returned {steps} early: iterate over all `run.steps`")
            session.checkpoints.finish()
        heartbeat.close()
    except Interrupted:
        raise
    except BaseException as error:
        cursor = session.cursor if session is not None else Cursor()
        step = cursor.done if cursor.done > cursor.start else 0
        message = worker_error(error, rank=rank, step=step, group=group, node_id=context.get_node_id())
        channel.post_and_wait(message)
        raise


def worker_error(error: BaseException, *, rank: int, step: int, group: str, node_id: str) -> WorkerError:
    """Describe an error for the driver, with the traceback outside libraries; errors of raydali have none."""
    passing = isinstance(error, StorageAway | NodeError)
    ours = isinstance(error, RaydaliError)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    outside = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return WorkerError(
        rank=rank,
        group=group,
        step=step,
        node_id=node_id,
        error=str(error) if ours else "".join(traceback.format_exception_only(error)).strip(),
        traceback="" if ours else "".join(traceback.format_list(outside)),
        usage=isinstance(error, UsageError),
        final=ours and not passing,
        storage=isinstance(error, StorageAway),
        node_fault=isinstance(error, NodeError),
    )
