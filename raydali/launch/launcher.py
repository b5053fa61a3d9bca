"""From a job's config to a finished run: the driver's side."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raydali.errors import UsageError
from raydali.launch.cluster import Placement
from raydali.launch.options import LaunchOptions
from raydali.report.console import Console
from raydali.report.run_folder import RunFolder

POLL_SECONDS = 0.2
KEPT_CHECKPOINTS = 3


class TrainingFailed(Exception):
    """The run ended early; the message is the worker's own error. Exit code 1."""


@dataclass(frozen=True)
class Job:
    """What runs: a training function `train(config, data, session)`, in every worker."""

    train: Callable[..., None]
    config: Any
    """Passed to every worker as it is."""
    data: Any
    """Put into Ray's object store: the workers of a node share one copy."""


def run(job: Job, options: LaunchOptions, placement: Placement, folder: RunFolder, console: Console) -> None:
    """Train in Ray Train workers until the end, telling the console and `events.jsonl` what happens.

    Raises:
        TrainingFailed: a worker failed more often than `max_failures`; the message is its own error.
        UsageError: a worker found that what was asked cannot be done.
        KeyboardInterrupt: the user's; the workers end with the driver.
    """
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from raydali.launch.mailbox import Mailbox
    from raydali.launch.ray_session import run_worker
    from raydali.launch.watcher import Watcher

    mailbox = Mailbox(f"raydali-{uuid.uuid4().hex}")
    elastic = placement.minimum < placement.maximum
    workers = (placement.minimum, placement.maximum) if elastic else placement.maximum
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={
            "train": job.train,
            "config": job.config,
            "data": ray.put(job.data),
            "folder": folder,
            "mailbox": mailbox,
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers,  # type: ignore[arg-type]  # the stub knows no (min, max)
            use_gpu=placement.gpu,
            resources_per_worker={"CPU": placement.cpus} | ({"GPU": 1} if placement.gpu else {}),
        ),
        run_config=RunConfig(
            name=folder.name,
            storage_path=folder.uri_of_storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT_CHECKPOINTS),
            callbacks=[Watcher(mailbox)],  # type: ignore[list-item]  # the stub knows no UserCallback
        ),
    )
    outcome: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_error_of(trainer.fit)), daemon=True, name="fit")
    thread.start()
    ear = _Ear(mailbox, folder, console)
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            ear.listen()
        ear.listen()
    except KeyboardInterrupt:
        folder.append("events.jsonl", _event("interrupt"))
        raise
    finally:
        console.close()
    if outcome[0] is not None:
        error = _explained(outcome[0], ear.errors)
        folder.append("events.jsonl", _event("stop", error=str(error).splitlines()[-1]))
        raise error
    folder.append("events.jsonl", _event("finish"))
    console.say(f"finished: {folder}")


def _error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


class _Ear:
    """Takes messages out of the mailbox to where they belong: the events, the console, or a list of errors."""

    def __init__(self, mailbox: Any, folder: RunFolder, console: Console) -> None:
        self.errors: list[Mapping[str, Any]] = []
        self._mailbox, self._folder, self._console = mailbox, folder, console
        self._began = time.monotonic()

    def listen(self) -> None:
        for message in self._mailbox.empty():
            if message["kind"] == "error":
                self.errors.append(message)
            elif message["kind"] == "event":
                message["seconds"] = round(time.monotonic() - self._began, 3)
                facts = {name: value for name, value in message.items() if name != "kind"}
                self._folder.append("events.jsonl", _event(**facts))
            self._console.show(message)


def _event(event: str, **facts: Any) -> dict[str, Any]:
    """A row of `events.jsonl`, with the time of now (seconds since 1970)."""
    return {"time": round(time.time(), 3), "event": event, **facts}


def _explained(outcome: BaseException, errors: list[Mapping[str, Any]]) -> Exception:
    """The first error that a worker itself had; the others' are often only its echo. Else what Ray knows."""
    if not errors:
        return TrainingFailed(str(outcome).strip() or type(outcome).__name__)
    first = errors[0]
    if first["usage"]:
        return UsageError(first["error"])
    return TrainingFailed(f"{first['traceback']}rank {first['rank']}: {first['error']}")
