"""Run Ray Train's trainer in the process of the channel, so that the driver need not import PyTorch and Ray Train.

The process is a fork of the job's server (launch/worker/process_server.py), which has imported them. Ray Train's
controller runs in it, too.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raydali.errors import TrainingError
from raydali.launch.channel import DriverChannel

if TYPE_CHECKING:
    import ray

    from raydali.launch.worker.task import WorkerTask

_PASSED_ON = "RAY_TRAIN_"
"""Ray Train passes variables with such names on to the workers."""
_READ_BY_RAY_TRAIN = _PASSED_ON, "TRAIN_", "RAY_CHDIR_"
"""How the names of the environment variables begin that Ray Train reads in the process of the trainer."""
_HEALTH_CHECK_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
_LEASE_SECONDS = 0.05
"""How long Ray takes to begin a process for a task. The task must not run: it would hold the process for a while."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The facts that Ray Train needs about a run.

    Attributes:
        name, storage: the run's name, and the folder of the runs, as a URI.
        workers: the number of workers, or the least and the most.
        replaces: see `controller.scaling.Trainer`.
        gpu: whether each worker has a GPU.
        cpus: CPU cores of each worker.
        timeout: of the process group.
        start_timeout: see `controller.scaling.Trainer`.
        health_check_seconds: the time between two polls of the workers.
        worker_variables: environment variables of the workers.
    """

    name: str
    storage: str
    workers: int | tuple[int, int]
    replaces: int
    gpu: bool
    cpus: int
    timeout: timedelta
    start_timeout: float
    health_check_seconds: float
    worker_variables: Mapping[str, str]


def train(training: Training, task: "ray.ObjectRef[WorkerTask]", channel: DriverChannel) -> None:
    """Train until the end.

    Raises:
        TrainingError: Ray Train ended with an error.
    """
    settings = {_HEALTH_CHECK_INTERVAL: f"{training.health_check_seconds:g}"}
    settings |= {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_RAY_TRAIN)}
    passed_on = {name: value for name, value in settings.items() if name.startswith(_PASSED_ON)}
    variables = {**passed_on, **training.worker_variables}
    if isinstance(training.workers, int):
        _start_processes(training.workers, training, variables)
    if (error := channel.call(_fit, training, {"task": task}, channel, settings, variables)) is not None:
        raise TrainingError(error)


def _start_processes(count: int, training: Training, variables: Mapping[str, str]) -> None:
    """Let Ray start the processes of the workers now, while that of the trainer starts, which then asks for them.

    Ray starts them for tasks with the environment of the workers, also if these are cancelled meanwhile, and gives a
    process to who needs one with the same environment.

    Args:
        count: the number of workers.
        training: says what fits on a node.
        variables: environment variables of the workers.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    places: list[str] = []
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        fit = has.get("CPU", 0) // training.cpus
        places += [node["NodeID"]] * int(min(fit, has.get("GPU", 0)) if training.gpu else fit)
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": dict(variables)})(lambda: None)
    here = [NodeAffinitySchedulingStrategy(node, soft=True) for node in places[:count]]
    tasks = [task.options(scheduling_strategy=each).remote() for each in here]
    time.sleep(_LEASE_SECONDS)
    for each in tasks:
        ray.cancel(each)


def _fit(
    training: Training,
    config: dict[str, Any],
    channel: DriverChannel,
    settings: Mapping[str, str],
    variables: Mapping[str, str],
) -> str | None:
    """Return the error with which Ray Train ended, or None. To read an exception of Ray Train, one must import it.

    Args:
        training: see `train`.
        config: what the workers receive.
        channel: see `train`.
        settings: environment variables of this process.
        variables: those of the workers.
    """
    os.environ.update(settings)
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
        replaces=training.replaces,
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
            worker_runtime_env={"env_vars": dict(variables)},  # type: ignore[call-arg]  # nor this
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        return str(error).strip() or type(error).__name__
    return None
