"""The training function's interface to the launcher, inside a Ray Train worker."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.v2._internal.execution.context import get_train_context  # the public API waits for all ranks

from raydali.data.loading.loader import Loader
from raydali.data.sources.reading import retries
from raydali.errors import NodeError, RaydaliError, StorageAway, UsageError
from raydali.host import start_clock
from raydali.host.checks import failed_checks
from raydali.host.facts import kernel_sees_gpu
from raydali.launch.channel import Interrupted
from raydali.launch.options import LaunchOptions
from raydali.launch.worker.environment import (
    WorkerEnvironment,
    environment,
    resolve_on_hardware,
    worker_environment,
)
from raydali.launch.worker.heartbeat import HeartbeatThread
from raydali.launch.worker.log_forwarding import forwarded_warnings
from raydali.launch.worker.rank_metrics import RankMetrics
from raydali.launch.worker.session import Cursor
from raydali.launch.worker.task import WorkerTask
from raydali.measure.records import Figures
from raydali.run.attempt import Attempt
from raydali.run.checkpoints import CheckpointStore
from raydali.run.events import Notice, Resumed, Started
from raydali.run.folder import RunFolder
from raydali.run.messages import ForwardedWarning, Message, Progress, RankFigures, RankWarning, WorkerError
from raydali.run.model_file import BestWeights
from raydali.text import plural
from raydali.train.weights.matching import MatchedWeights
from raydali.train.worker import Worker

PROGRESS_SECONDS = 0.5


class RaySession:
    """The Session inside a Ray Train worker.

    Ray Train's checkpoints are not used: Ray Train ends a run if it cannot rewrite its record of them.
    """

    def __init__(self, task: WorkerTask) -> None:
        start_clock.mark("worker start")
        context = ray.get_runtime_context()
        cpus, node = int(context.get_assigned_resources().get("CPU", 1)), context.get_node_id()[:8]
        self._channel = task.channel
        folder = replace(task.folder, warn=self.warn)
        self.worker = worker = Worker.join(_device(), cpus=cpus, node=node, timeout=task.options.group_timeout)
        attempt = self._attempt(task.attempt, folder, worker)
        start_clock.mark("process group")
        self._environment = environment(
            [WorkerEnvironment(**each) for each in worker.gather(asdict(worker_environment(worker)))]
        )
        if attempt.group == 1:
            start_clock.join(task.marks)
        self.folder = attempt.fenced(folder)
        self._metrics = RankMetrics(self.folder.name, worker.rank, worker.device)
        kept_steps = task.options.kept_steps(task.samples)
        self._checkpoints = CheckpointStore(self.folder, self.worker, self.emit, kept_steps)
        self._resumed = False
        self._weights = task.weights
        self.steps_left = 0
        self.cursor = Cursor()
        self._taken = 0
        self._last_progress = 0.0

    def _attempt(self, driver: str, folder: RunFolder, worker: Worker) -> Attempt:
        """Return this worker group's attempt, after rank 0 has taken the folder over for it."""
        number = 0
        if worker.rank == 0:
            number = self._channel.next_group()
            with folder.must_answer():
                Attempt(driver, number).take(folder)
        return Attempt(driver, worker.from_first(number))

    def latest(self) -> dict[str, Any] | None:
        """See this method of Session."""
        state = self._checkpoints.newest()
        self._resumed = state is not None
        return state

    def starting_weights(self) -> MatchedWeights | None:
        """See this method of Session."""
        return ray.get(self._weights)

    def commit(
        self,
        step: int,
        state: dict[str, Any] | None,
        *,
        best: BestWeights | None = None,
        save_error: str = "",
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        """See this method of Session."""
        if state is not None:
            self._checkpoints.save(step, state, best=best, save_error=save_error, before_writing=before_writing)

    def finish(self) -> None:
        """See this method of Session."""
        self._checkpoints.finish()

    def emit(self, message: Message) -> None:
        """See this method of Session."""
        self._channel.post(message)

    def warn(self, text: str) -> None:
        """See this method of Session."""
        self.emit(RankWarning(self.worker.rank, text))

    def report_start(self, *, steps: int) -> None:
        """See this method of Session."""
        if self.worker.rank == 0:
            started = Resumed if self._resumed else Started
            self.emit(
                started(
                    step=self.cursor.start,
                    steps=steps,
                    world_size=self.worker.world_size,
                    device=self.worker.device.type,
                    **self._environment,
                    train_run=get_train_context().train_run_context.run_id,
                    phases=start_clock.phases(),
                )
            )

    def report_progress(self, *, steps: int, epoch: int, epochs: int, samples_consumed: int) -> None:
        """See this method of Session."""
        step, self._taken = self.cursor.done, Loader.batches_taken
        now = time.monotonic()
        if self.worker.rank == 0 and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.emit(Progress(step=step, steps=steps, epoch=epoch, epochs=epochs, samples_consumed=samples_consumed))

    def progress(self) -> float:
        """Return the progress of this rank; see HeartbeatThread."""
        return self.cursor.done + (0.5 if Loader.batches_taken > self._taken else 0.0)

    def notice(self) -> Notice | None:
        """See this method of Session."""
        self._checkpoints.check()
        if get_train_context().preemption_context.preemption_info is not None:
            return "preemption"
        return self._channel.notice() if self.worker.rank == 0 else None

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


def run_worker(config: dict[str, "ray.ObjectRef[WorkerTask]"]) -> None:
    """Run the job's training function in a Ray Train worker. Report an error to the driver before raising it."""
    task = ray.get(config["task"])
    channel = task.channel
    session: RaySession | None = None
    heartbeat = _heartbeat(channel.post, lambda: session, task.options)  # its start may hang, too
    try:
        session = RaySession(task)
        if session.worker.device.type == "cuda" and ray.train.get_context().get_local_rank() == 0:
            for text in failed_checks():
                session.warn(text)
        worker = session.worker
        with forwarded_warnings(lambda text: channel.post(ForwardedWarning(worker.rank, text))):
            options = resolve_on_hardware(task.options, session, samples=task.samples)
            task.train(options, ray.get(task.data), session)
            if session.steps_left:
                left = plural(session.steps_left, "step")
                raise UsageError(f"the job's train function returned {left} early: iterate over all `run.steps`")
            session.finish()
        heartbeat.close()
    except Interrupted:
        raise
    except BaseException as error:
        rank = ray.train.get_context().get_world_rank()
        cursor, node_id = session.cursor if session else Cursor(), ray.get_runtime_context().get_node_id()
        step = cursor.done if cursor.done > cursor.start else 0
        channel.post_and_wait(worker_error(error, rank=rank, step=step, group=_group(), node_id=node_id))
        raise


def _heartbeat(
    emit: Callable[[Message], None], session: Callable[[], RaySession | None], options: LaunchOptions
) -> HeartbeatThread:
    """Begin to send heartbeats; the session is None while it is made."""
    node_id = ray.get_runtime_context().get_node_id()
    return HeartbeatThread(
        emit,
        lambda: Loader.batches_taken + retries(),
        lambda: made.progress() if (made := session()) else 0.0,
        min(timeout / 2 or float("inf") for timeout in (options.hang_timeout, options.start_timeout)),
        rank=ray.train.get_context().get_world_rank(),
        group=_group(),
        node=node_id[:8],
        node_id=node_id,
    )


def _group() -> str:
    """Return an id that the workers of one group share."""
    return str(ray.get_runtime_context().get_placement_group_id())


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
