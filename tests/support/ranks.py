"""Ranks as plain gloo processes: what a training function does on several workers, without starting Ray."""

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from raydali.data.stream.stream import Stream
from raydali.launch.worker.session import Session
from raydali.measure.records import Figures
from raydali.run.events import Event, Notice, Started
from raydali.run.folder import RunFolder
from raydali.run.messages import Message
from raydali.training.weights.matching import MatchedWeights
from raydali.training.worker import Worker

# What takes seconds to import is imported once, then every rank is a fork of that clean process.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pandas",  # pyarrow imports it at the first table
        "torch",
        "torchvision.transforms.v2",
        "nvidia.dali.fn",
        "torchmetrics.functional.image",
        "jobs.imagenet",
        "raydali.launch.worker.training_run",
        # What a job imports in a worker, a test beside its job, and both for their images and tables.
        "raydali.data.broken.screening",
        "raydali.data.load.dali_loader",
        "raydali.training.evaluation.classification",
        "raydali.training.losses",
        "raydali.training.optim",
        "raydali.training.sharding",
        "pyarrow.pandas_compat",
        "safetensors.torch",
        "tests.support.broken",
        "tests.support.job_ranks",
        "tests.support.messages",
        "tests.support.untraced",
        "timm",
    ]
)
CPU = torch.device("cpu")


class Stopped(Exception):  # noqa: N818 (no error: the test wants it)
    """A LocalSession was told to end here, as a kill would."""


class LocalSession(Session):
    """A Session of a plain process, which keeps the messages to the driver."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        stop_at: int | None = None,
        device: torch.device = CPU,
        cpus: int = 1,
        waits_for_saves: bool = True,
    ) -> None:
        super().__init__(
            Worker.join(device, cpus=cpus, node="local"),
            folder,
            *cast(Any, (None, None)),  # there is no driver, and no Ray Train
            weights=lambda: self.weights,
        )
        self.messages: list[Message] = []
        self.noticed: Notice | None = None
        self.weights: MatchedWeights | None = None
        self._stop_at, self._waits_for_saves = stop_at, waits_for_saves

    def commit(self, step: int, state: dict[str, Any] | None, **options: Any) -> None:
        super().commit(step, state, **options)
        if self._waits_for_saves:
            self.checkpoints.wait()  # so that a test knows what is saved when it stops a rank
        self.worker.barrier()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the events among the messages."""
        return [message.row() for message in self.messages if isinstance(message, Event)]

    def emit(self, message: Message) -> None:
        self.messages.append(message)

    def report_start(self, *, steps: int) -> None:
        device = self.worker.device.type
        self.emit(Started(step=self.cursor.start, steps=steps, world_size=self.worker.world_size, device=device))

    def report_progress(self, stream: Stream) -> None:
        if self.cursor.done == self._stop_at:
            raise Stopped

    def notice(self) -> Notice | None:
        if self.checkpoints.error is not None:
            raise self.checkpoints.error
        return self.noticed

    def publish(self, figures: Figures) -> None:
        """No message: the tests look at the others."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """What `function(*args)` returns in each of `world_size` gloo processes, in order of rank.

    Raises:
        AssertionError: a rank raised; with its traceback.
        Stopped: a rank was told to stop.
    """
    # They meet at a file: for each connection to a TCPStore, torch asks the DNS for a name, which may take 5 s.
    folder, queue = tempfile.TemporaryDirectory(), context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, f"{folder.name}/store", queue, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results: dict[int, Any] = {}
        while len(results) < world_size:
            rank, result, error = queue.get(timeout=timeout)
            if error == "Stopped":
                raise Stopped
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = result
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()


def _rank(rank: int, world_size: int, file: str, queue: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork is no garbage: loaders that close would look through it
    try:
        store = dist.FileStore(file, world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        queue.put((rank, function(*args), None))
        dist.barrier()
    except Stopped:
        queue.put((rank, None, "Stopped"))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def folder_of(path: Path, name: str = "run") -> RunFolder:
    """A made run folder below a temporary path."""
    folder = RunFolder(str(path), name)
    folder.create()
    return folder
