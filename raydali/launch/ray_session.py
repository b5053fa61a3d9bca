"""A training function's surroundings inside a Ray Train worker."""

import io
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from raydali.doctor.checks import unfit
from raydali.errors import DataError, UsageError
from raydali.launch.mailbox import Mailbox
from raydali.launch.metrics import RankMetrics
from raydali.measure.pulse import Figures
from raydali.report.run_folder import RunFolder
from raydali.train import checkpoints
from raydali.train.worker import Worker

PROGRESS_SECONDS = 0.5


class RaySession:
    """See session.Session; checkpoints are Ray Train's, written by its upload thread straight to storage."""

    def __init__(self, folder: RunFolder, mailbox: Mailbox) -> None:
        context = ray.get_runtime_context()
        self.folder = folder
        self.worker = Worker.join(
            _device(), cpus=int(context.get_assigned_resources().get("CPU", 1)), node=context.get_node_id()[:8]
        )
        self._mailbox = mailbox
        self._metrics = RankMetrics(folder.name, self.worker.rank, self.worker.device)
        self._uploaded = threading.Event()
        self._uploaded.set()
        self._resumed = False
        self._last_progress = 0.0

    def latest(self) -> dict[str, Any] | None:
        """See Session. Where Ray has lost its record of checkpoints, the newest that lies in the folder."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            folder = checkpoint.path
        elif names := [name for name in self.folder.folders() if self.folder.exists(f"{name}/{checkpoints.FILE_NAME}")]:
            folder = self.folder.path(names[-1])
        else:
            return None
        with self.folder.filesystem.open_input_file(f"{folder}/{checkpoints.FILE_NAME}") as file:
            state = checkpoints.read(file)
        self._resumed = True
        return state

    def commit(self, step: int, state: dict[str, Any] | None, *, best: dict[str, Any] | None = None) -> None:
        """See Session. Waits for the previous upload, so that snapshots do not pile up in memory."""
        self._uploaded.wait()
        checkpoint = None
        if state is not None:
            self._uploaded.clear()
            # Ray wants a folder to upload; ours comes into being at the other end.
            checkpoint = ray.train.Checkpoint.from_directory(tempfile.gettempdir())
        ray.train.report(
            {},
            checkpoint=checkpoint,
            checkpoint_dir_name=f"checkpoint_{step:09d}",
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._uploader(state, best) if state is not None else None,
            delete_local_checkpoint_after_upload=False,
        )

    def _uploader(self, state: dict[str, Any], best: dict[str, Any] | None) -> Callable[[Any, str], Any]:
        # Ray calls it again where a store failed in passing; where it fails for good, Ray ends the worker group.
        def upload(_: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            self._write(f"{name}/{checkpoints.FILE_NAME}", state)
            if best is not None:
                self._write(f"best/{checkpoints.FILE_NAME}", best)
            self._uploaded.set()
            return ray.train.Checkpoint(self.folder.path(name), self.folder.filesystem)

        return upload

    def _write(self, file: str, state: dict[str, Any]) -> None:
        contents = io.BytesIO()
        checkpoints.write(state, contents)
        self.folder.write(file, contents.getvalue())

    def tell(self, kind: str, **facts: Any) -> None:
        """See Session."""
        self._mailbox.post(kind=kind, **facts)

    def tell_start(self, *, step: int, steps: int) -> None:
        """See Session."""
        if self.worker.rank == 0:
            facts = {"world_size": self.worker.world_size, "device": self.worker.device.type}
            self.tell("event", event="resume" if self._resumed else "start", step=step, steps=steps, **facts)

    def tell_progress(self, *, step: int, steps: int, epoch: int, samples_consumed: int) -> None:
        """See Session."""
        now = time.monotonic()
        if self.worker.rank == 0 and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.tell("progress", step=step, steps=steps, epoch=epoch, samples_consumed=samples_consumed)

    def publish(self, figures: Figures) -> None:
        """See Session. To Ray's metrics, which Prometheus collects."""
        self._metrics.publish(figures)


def _device() -> torch.device:
    """The device that Ray Train gave this worker; the CPU where GPUs are declared but none exists."""
    device: torch.device = ray.train.torch.get_device()
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def run_worker(config: dict[str, Any]) -> None:
    """What each Ray Train worker runs: the job's training function, its own error told to the driver first."""
    mailbox: Mailbox = config["mailbox"]
    try:
        session = RaySession(config["folder"], mailbox)
        if session.worker.device.type == "cuda" and ray.train.get_context().get_local_rank() == 0:
            for text in unfit():
                session.tell("warning", rank=session.worker.rank, text=text)
        config["train"](config["options"], ray.get(config["data"]), session)
    except BaseException as error:
        rank = ray.train.get_context().get_world_rank()
        mailbox.post_and_wait(kind="error", rank=rank, **_described(error))
        raise


def _described(error: BaseException) -> dict[str, Any]:
    """What the driver shows of an error: our own need no traceback, others only the frames outside libraries."""
    if isinstance(error, UsageError | DataError):
        return {"error": str(error), "traceback": "", "usage": isinstance(error, UsageError), "final": True}
    frames = traceback.extract_tb(error.__traceback__)[1:]
    ours = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    text = "".join(traceback.format_exception_only(error)).strip()
    return {"error": text, "traceback": "".join(traceback.format_list(ours)), "usage": False, "final": False}
