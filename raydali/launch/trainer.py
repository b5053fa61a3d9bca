"""Train one worker group with Ray Train, in the process of the channel, and learn why it ended.

The driver calls `fit` for each group, and decides what follows. It need not import PyTorch and Ray Train itself.
"""

import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raydali.host.hardware import HARDWARE_QUEUES
from raydali.run.events import Failure, Preemption
from raydali.text import error_line

if TYPE_CHECKING:
    import ray
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]
    from ray.train.v2.api.config import ScalingConfig

    from raydali.launch.job import WorkerTask

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""The variable with the seconds for which Ray Train waits for the places of a group."""
WORKER_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": str(HARDWARE_QUEUES)}
_importing = threading.Lock()
GroupEnd = Failure | Preemption | Literal["finished", "left", "not placed"]
"""How a group ended: "left" on the driver's notice; "not placed": there was no room for it."""


def _read_by_ray_train() -> dict[str, str]:
    prefixes = "RAY_TRAIN_", "TRAIN_", "RAY_CHDIR_"
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The facts that Ray Train needs about all groups of a run.

    Attributes:
        name: the run's name.
        workers: the largest number of workers.
        resources: CPU cores and GPUs of each worker.
        timeout: of the process group.
        settings: environment variables of the driver that Ray Train reads.
    """

    name: str
    workers: int
    resources: Mapping[str, float]
    timeout: timedelta
    settings: Mapping[str, str] = field(default_factory=_read_by_ray_train)

    @property
    def worker_variables(self) -> dict[str, str]:
        """Environment variables of the workers."""
        # Ray Train would pass its own ones on, too: then the workers would get no process that was started for them.
        of_ray_train = {name: value for name, value in self.settings.items() if name.startswith("RAY_TRAIN_")}
        polls = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": f"{health_check_seconds(self.workers):g}"}
        return {**polls, **of_ray_train, **WORKER_ENVIRONMENT}

    def scaling(self, workers: int, left_out: Sequence[str]) -> "ScalingConfig":
        """Return the request for so many workers, none of them on the nodes with these ids."""
        from ray.train.v2.api.config import ScalingConfig

        return ScalingConfig(
            num_workers=workers,
            use_gpu="GPU" in self.resources,
            resources_per_worker=dict(self.resources),
            label_selector={"ray.io/node-id": f"!in({','.join(left_out)})"} if left_out else None,
        )


def health_check_seconds(workers: int) -> float:
    """Return the interval at which Ray Train's controller polls all workers: at most 400 workers a second."""
    return max(0.25, workers / 400)


def fit(
    training: Training,
    task: "Mapping[str, ray.ObjectRef[WorkerTask] | str]",
    workers: int,
    left_out: Sequence[str],
    placement_timeout: float,
) -> GroupEnd:
    """Train a worker group until it ends.

    Args:
        training: see there.
        task: the reference to the workers' task, in a dictionary so that Ray does not fetch it here, and the number of
            the group.
        workers: their number.
        left_out: ids of the nodes on which no worker may start.
        placement_timeout: seconds for which the group may wait for its places.
    """
    os.environ[START_TIMEOUT] = str(placement_timeout)
    _import_ray_train(training)
    import ray
    from ray.train.v2.api.config import FailureConfig, RunConfig  # ray.train has the types of the first version

    from raydali.launch.train_backend import Trainer, WorkerProcesses
    from raydali.launch.worker.run_worker import run_worker

    context = ray.get_runtime_context()
    try:
        Trainer(
            run_worker,
            train_loop_config=dict(task),
            torch_config=WorkerProcesses(backend="gloo", timeout_s=int(training.timeout.total_seconds())),
            scaling_config=training.scaling(workers, left_out),
            run_config=RunConfig(
                name=training.name,
                # Ray Train tests that it can write there. It keeps nothing there, since checkpoints are raydali's own.
                storage_path=str(Path(context.get_temp_dir(), context.get_session_name(), "raydali")),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                worker_runtime_env={"env_vars": training.worker_variables},
            ),
        ).fit()
    except Exception as error:
        remove_places()  # Ray Train keeps the places of a group whose process group was not set up
        return end_of(error)
    return "finished"


def _import_ray_train(training: Training) -> None:
    """Import Ray Train with the run's settings; two threads that import it at once would block each other."""
    with _importing:
        os.environ.update({**training.settings, **training.worker_variables})
        importlib.import_module("raydali.launch.train_backend")


def end_of(error: Exception) -> GroupEnd:
    """Return how a worker group ended, by the error of Ray Train."""
    from ray.train import ControllerError, PreemptionError, WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

    from raydali.launch.channel import Interrupted

    if isinstance(error, PreemptionError):
        return Preemption(ranks=sorted(error.preemption_info.preempted_ranks), error=error_line(error))
    if not isinstance(error, WorkerGroupError):
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        if isinstance(cause, WorkerGroupStartupTimeoutError):
            return "not placed"
        return Failure(ranks=[], killed=[], error=error_line(cause), starting=True)
    errors = error.worker_failures
    # Ray Train wraps the error of a worker, and the death of a process.
    causes = [getattr(failure, "_base_exc", failure) for failure in errors.values()]
    notices = {cause.notice for cause in causes if isinstance(cause, Interrupted)}
    if {"stop", "resize"} & notices:
        return "left"
    ranks, killed = sorted(errors), sorted(rank for rank in errors if hasattr(errors[rank], "health_check_failure"))
    if notices:
        return Preemption(ranks=ranks, killed=killed, error="left after a checkpoint")
    lines = "; ".join(sorted({error_line(failure) for failure in errors.values()} - {""})) or error_line(error)
    is_preempted = any(getattr(getattr(cause, "health_check_failure", cause), "preempted", False) for cause in causes)
    return (Preemption if is_preempted else Failure)(ranks=ranks, killed=killed, error=lines)


def request_workers(training: Training, requester: str, workers: int, left_out: Sequence[str]) -> None:
    """Let the cluster's autoscaler start nodes for workers that no group has yet, for the next three minutes.

    Args:
        training: see there.
        requester: replaces the earlier request of this id.
        workers: their number; 0: the request is over.
        left_out: ids of the nodes on which no worker may start.
    """
    _import_ray_train(training)
    from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
        TrainAutoscalingCoordinatorClient,
    )

    client = TrainAutoscalingCoordinatorClient(requester)
    if workers:
        client.send_resource_request(training.scaling(workers, left_out), workers)
    else:
        client.cancel_resource_request()


def has_places() -> bool:
    """Return whether a worker group of this job has its places."""
    return any(group.state == group.CREATED for group in _placement_groups())


def remove_places() -> None:
    """Remove the places of the worker groups of this job, and so end their processes."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for group in _placement_groups():
        with suppress(ray.exceptions.RayError):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def _placement_groups() -> "Iterator[PlacementGroupTableData]":
    import ray
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]

    job = bytes.fromhex(ray.get_runtime_context().get_job_id())
    # ray.util.placement_group_table() does not name their jobs.
    for packed in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(packed)
        if group.creator_job_id == job and group.state != PlacementGroupTableData.REMOVED:
            yield group
