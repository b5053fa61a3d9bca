"""Decide in Ray Train's controller when a worker group starts, with how many workers and on which nodes.

The driver decides whether a run continues, after which pause and without which nodes (launch/driver/restart_policy.py),
and writes its decision on the channel's board. The controller posts the end of each worker group with its number, and
starts the next group when the board permits it. Runs of MIN:MAX workers start with the resources that other jobs leave
free. Ray's own policy also counts the resources that other jobs hold, and so would wait forever for them.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    ResizingState,
    RestartingState,
    RunningState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

from raydali.launch.channel import Board, DriverChannel
from raydali.launch.controller.group_end import end_of, only_waits
from raydali.launch.controller.workers import Workers
from raydali.run.events import GroupEnded, Resize, WorkerAddress
from raydali.run.messages import Placed

if TYPE_CHECKING:
    from ray.air.result import Result
    from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
    from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

_log = logging.getLogger(__name__)

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
POLL_SECONDS = 0.1
SETTLE_SECONDS = 5.0
"""Time for the resources of a dead worker group to become free, before a smaller group is started."""
LEAVE_SECONDS = 30.0
"""Time in which workers save a checkpoint and leave before a resize."""
WORKERS_A_SECOND = 50
"""Number of workers placed per second, by which the timeout of a group's start is computed."""
MAX_TIMEOUT_SECONDS = 120.0


class Trainer(TorchTrainer):
    """A TorchTrainer whose worker groups start when the driver permits it; only the driver judges failures.

    The controller runs in this process: an actor of its own, as Ray Train starts it, takes a second to start.

    Args:
        start_timeout: see `Workers`.
    """

    def __init__(self, *args: Any, channel: DriverChannel, start_timeout: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._channel, self._start_timeout = channel, start_timeout

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        """Leave out what only starts further processes: for Ray's data sets, and to clean up after a controller.

        Where this process ends, the driver ends, too, and Ray then removes the workers' placement group.
        """
        unused = DatasetsCallback, PlacementGroupCleanerCallback
        return [each for each in super()._create_default_callbacks() if not isinstance(each, unused)]

    def _initialize_and_run_controller(self, **arguments: Any) -> "Result":
        of_ray = arguments["scaling_policy"]
        policy = ElasticPolicy if isinstance(of_ray, ElasticScalingPolicy) else FixedPolicy
        arguments["scaling_policy"] = policy(of_ray.scaling_config, self._channel)
        Workers.start_timeout = self._start_timeout
        arguments["failure_policy"] = _Retry(arguments["failure_policy"].failure_config)
        controller = _Controller(**arguments)
        asyncio.run(controller.run())  # type: ignore[no-untyped-call]  # of Ray
        return controller.get_result()


class _Controller(TrainController):
    """A controller that ends a failed worker group at once; Ray's keeps its resources until the next start."""

    worker_group_cls = Workers
    _worker_group: Workers | None

    def _make_and_handle_scaling_decision_for_non_running_worker_group(
        self, controller_state: TrainControllerState
    ) -> "TrainControllerLoopIterationResult":
        if self._worker_group is not None:
            self._worker_group.end()
            self._worker_group = None
        return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)


class _Retry(FailurePolicy):
    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """Retry after any failure: the scaling policy waits until the driver permits the next group."""
        return FailureDecision.RETRY


class _Supervised(ScalingPolicy):
    """A scaling policy that starts a worker group when the driver permits it, and posts the ends of groups."""

    def __init__(self, scaling_config: ScalingConfig, channel: DriverChannel) -> None:
        super().__init__(scaling_config)
        self.channel = channel
        self._board = Board()
        self._ends = 0
        self._places: dict[int, WorkerAddress] = {}
        self._resize_to: int | None = None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """See the base class; nothing starts unless the driver permits it."""
        self._board = self.channel.board()
        if self._board.permitted >= self._ends:
            decision = super().make_decision_for_non_running_worker_group()  # type: ignore[safe-super]
        else:
            self._maybe_send_resource_request()  # type: ignore[no-untyped-call]  # it would expire in a long pause
            decision = NoopDecision()
        if isinstance(decision, NoopDecision):
            time.sleep(POLL_SECONDS)  # Ray's loop asks again at once
        return decision

    def make_decision_for_running_worker_group(
        self, worker_group_state: "WorkerGroupState", worker_group_status: "WorkerGroupPollStatus"
    ) -> ScalingDecision:
        """See the base class; also records where the workers run."""
        self._places = {
            rank: (worker.metadata.node_id, worker.metadata.pid)
            for rank, worker in enumerate(worker_group_state.workers)
        }
        return super().make_decision_for_running_worker_group(  # type: ignore[safe-super]
            worker_group_state, worker_group_status
        )

    def on_controller_start_worker_group(
        self, *, scaling_config: ScalingConfig, num_workers: int
    ) -> dict[str, str] | None:
        """See the base class; excludes the nodes on the board's list."""
        nodes = self._board.left_out
        return {ray._raylet.RAY_NODE_ID_KEY: f"!in({','.join(nodes)})"} if nodes else None  # type: ignore[attr-defined]

    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """See the base class; first lets a running group save a checkpoint and leave."""
        if self._resize_to is None:
            return
        self.channel.ask_to_resize(True)
        deadline = time.monotonic() + LEAVE_SECONDS
        while not (board := self.channel.board()).left and board.training and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._post_end(Resize(workers=self._resize_to))
        self.channel.ask_to_resize(False)
        self._resize_to = None

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        """See the base class; posts the end of a group."""
        if isinstance(current_state, ResizingState):
            self._resize_to = getattr(current_state.scaling_decision, "num_workers", 0)
        elif isinstance(current_state, RestartingState | ReschedulingState) and current_state is not previous_state:
            if only_waits(current_state):
                return
            self._post_end(end_of(current_state, self._places))
            self._places = {}

    def _post_end(self, end: GroupEnded | None) -> None:
        self._ends += 1
        if end is not None:
            self.channel.post(replace(end, number=self._ends))


class FixedPolicy(_Supervised, FixedScalingPolicy):
    """The policy for a fixed number of workers."""


class ElasticPolicy(_Supervised, ElasticScalingPolicy):
    """The policy for MIN:MAX workers."""

    def __init__(self, scaling_config: ScalingConfig, channel: DriverChannel) -> None:
        super().__init__(scaling_config, channel)
        self._own: Mapping[str, int] = {}
        self._scarce_since: float | None = None
        self._timeouts = 0
        self._timeout: float | None = None

    def make_decision_for_running_worker_group(
        self, worker_group_state: "WorkerGroupState", worker_group_status: "WorkerGroupPollStatus"
    ) -> ScalingDecision:
        """See the base class; a group that has not completed its first step is not resized."""
        self._own = Counter(worker.metadata.node_id for worker in worker_group_state.workers)
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, ResizeDecision) and not self.channel.board().training:
            return NoopDecision()
        return decision

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """See the base class."""
        self._own = {}
        return super().make_decision_for_non_running_worker_group()

    def _count_possible_workers(self, reserved_resources: dict[str, dict[str, float]]) -> int:
        """Return how many workers fit into free resources and those of our own group; 0 while more may become free."""
        usable = {node: had for node, had in reserved_resources.items() if node not in self._board.left_out}
        need = self.scaling_config._resources_per_worker_not_none
        free = ray._private.state.available_resources_per_node()

        def limited(node: str, name: str, amount: float) -> float:
            there: float = free.get(node, {}).get(name, 0.0) + self._own.get(node, 0) * need.get(name, 0.0)
            return min(amount, there)

        limits = {node: {name: limited(node, name, had[name]) for name in had} for node, had in usable.items()}
        possible: int = super()._count_possible_workers(limits)
        if self._own or possible == super()._count_possible_workers(usable):
            self._scarce_since = None
            return possible
        now = time.monotonic()
        if self._scarce_since is None:
            self._scarce_since = now
        return possible if now - self._scarce_since >= SETTLE_SECONDS else 0

    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """See the base class; increases the start timeout for large groups, and doubles it after a timeout."""
        super().before_controller_execute_resize_decision(resize_decision)
        if self._timeout is None:
            self._timeout = float(os.environ[START_TIMEOUT])
        seconds = (self._timeout + resize_decision.num_workers / WORKERS_A_SECOND) * 2**self._timeouts
        os.environ[START_TIMEOUT] = str(max(self._timeout, min(seconds, MAX_TIMEOUT_SECONDS)))
        if resize_decision.num_workers < self.scaling_config.max_workers:
            self.channel.post(Placed(resize_decision.num_workers, self.scaling_config.max_workers))

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        """See the base class."""
        super().after_controller_state_update(previous_state, current_state)
        if isinstance(current_state, RunningState):
            self._timeouts = 0
        elif only_waits(current_state):
            self._timeouts += 1
