"""Run Ray Train's trainer in the process of the channel, so that the driver need not import PyTorch and Ray Train.

The process is a fork of the job's server (launch/worker/process_server.py), which has imported them. Ray Train's
controller runs in it, too.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raydali.errors import TrainingError
from raydali.launch.channel import DriverChannel

if TYPE_CHECKING:
    import ray

    from raydali.launch.worker.task import WorkerTask

_READ_BY_RAY_TRAIN = "RAY_TRAIN_", "TRAIN_", "RAY_CHDIR_"
"""How the names of the environment variables begin that Ray Train reads in the process of the trainer."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The facts that Ray Train needs about a run.

    Attributes:
        name, storage: the run's name, and the folder of the runs, as a URI.
        workers: the number of workers, or the least and the most.
        gpu: whether each worker has a GPU.
        cpus: CPU cores of each worker.
        timeout: of the process group.
        start_timeout: see `controller.scaling.Trainer`.
        worker_variables: environment variables of the workers, and of the trainer.
    """

    name: str
    storage: str
    workers: int | tuple[int, int]
    gpu: bool
    cpus: int
    timeout: timedelta
    start_timeout: float
    worker_variables: Mapping[str, str]


def train(training: Training, task: "ray.ObjectRef[WorkerTask]", channel: DriverChannel) -> None:
    """Train until the end.

    Raises:
        TrainingError: Ray Train ended with an error.
    """
    settings = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_RAY_TRAIN)}
    if (error := channel.call(_fit, training, {"task": task}, channel, settings)) is not None:
        raise TrainingError(error)


def _fit(training: Training, config: dict[str, Any], channel: DriverChannel, settings: Mapping[str, str]) -> str | None:
    """Return the error with which Ray Train ended, or None. To read an exception of Ray Train, one must import it."""
    os.environ.update({**settings, **training.worker_variables})
    from ray.train import RunConfig, ScalingConfig

    from raydali.launch.controller.scaling import START_TIMEOUT, Trainer
    from raydali.launch.worker.process_group import WorkerProcesses
    from raydali.launch.worker.ray_session import run_worker

    if not isinstance(training.workers, int):
        # Free resources may be taken, or their node dead, when workers are placed: then they are counted again.
        os.environ.setdefault(START_TIMEOUT, "3")
    trainer = Trainer(
        run_worker,
        channel=channel,
        start_timeout=training.start_timeout,
        train_loop_config=config,
        torch_config=WorkerProcesses(backend="gloo", timeout_s=int(training.timeout.total_seconds())),
        scaling_config=ScalingConfig(
            num_workers=training.workers,  # type: ignore[arg-type]  # the stub knows no (min, max)
            use_gpu=training.gpu,
            resources_per_worker={"CPU": training.cpus} | ({"GPU": 1} if training.gpu else {}),
        ),
        run_config=RunConfig(
            name=training.name,
            storage_path=training.storage,
            worker_runtime_env={"env_vars": dict(training.worker_variables)},  # type: ignore[call-arg]  # nor this
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        return str(error).strip() or type(error).__name__
    return None
