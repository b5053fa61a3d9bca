"""When worker groups start, and with how many workers: Ray Train's policies, as the controller calls them."""

import os
from typing import Any

import pytest
import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    ResizingState,
    RestartingState,
    RunningState,
)
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from raydali.launch.channel import Board
from raydali.launch.controller import scaling
from raydali.launch.controller.scaling import START_TIMEOUT, ElasticPolicy, FixedPolicy
from raydali.run.events import Failure, Resize
from raydali.run.messages import Message, Placed


class Desk:
    """A channel that keeps what is posted, and a board that the test writes."""

    def __init__(self) -> None:
        self.on_board = Board()
        self.posted: list[Message] = []
        self.asked: list[bool] = []

    def board(self) -> Board:
        return self.on_board

    def post(self, message: Message) -> None:
        self.posted.append(message)

    def ask_to_resize(self, wanted: bool) -> None:
        self.asked.append(wanted)


def policy(kind: type[Any], workers: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = kind(ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}), desk)
    monkeypatch.setattr(made, "_maybe_send_resource_request", lambda: None)
    monkeypatch.setattr(made, "_get_reserved_resources", lambda: {"a": {"CPU": 2.0}, "b": {"CPU": 1.0}}, raising=False)
    monkeypatch.setattr(scaling, "POLL_SECONDS", 0)
    return made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """What is free on each node; all of it at first."""
    resources = {"a": {"CPU": 2.0}, "b": {"CPU": 1.0}}
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: resources)
    return resources


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("raydali.launch.controller.scaling.time.monotonic", lambda: now[0])
    return now


def started(decision: Any) -> int:
    """Workers that are to start; 0 for none."""
    return decision.num_workers if isinstance(decision, ResizeDecision) else 0


def test_a_group_starts_when_the_driver_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    fixed = policy(FixedPolicy, 3, desk, monkeypatch)
    assert started(fixed.make_decision_for_non_running_worker_group()) == 3
    failed = RestartingState(training_failed_error=WorkerGroupError("it died", {1: ValueError("no")}))
    fixed.after_controller_state_update(RunningState(), failed)
    fixed.after_controller_state_update(failed, failed)  # Ray's loop, while nothing is decided
    (end,) = desk.posted
    assert isinstance(end, Failure) and end.number == 1 and end.ranks == [1]
    assert isinstance(fixed.make_decision_for_non_running_worker_group(), NoopDecision)
    desk.on_board = Board(permitted=1, left_out=("x", "y"))
    assert started(fixed.make_decision_for_non_running_worker_group()) == 3
    assert fixed.on_controller_start_worker_group(scaling_config=None, num_workers=3) == {"ray.io/node-id": "!in(x,y)"}


def test_elastic_groups_take_what_is_free_once_that_has_settled(
    free: dict[str, dict[str, float]], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    elastic = policy(ElasticPolicy, (1, 3), desk, monkeypatch)
    assert started(elastic.make_decision_for_non_running_worker_group()) == 3
    free["a"] = {"CPU": 1.0}
    assert started(elastic.make_decision_for_non_running_worker_group()) == 0  # a dead group's places may come free
    clock[0] += scaling.SETTLE_SECONDS
    assert started(elastic.make_decision_for_non_running_worker_group()) == 2
    del free["a"]  # a dead node, which the coordinator does not know of yet
    assert started(elastic.make_decision_for_non_running_worker_group()) == 1
    free["a"] = {"CPU": 2.0}
    assert started(elastic.make_decision_for_non_running_worker_group()) == 3
    desk.on_board = Board(left_out=("a",))
    assert started(elastic.make_decision_for_non_running_worker_group()) == 1


@pytest.mark.usefixtures("free")
def test_starts_that_time_out_get_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT, "3")
    elastic = policy(ElasticPolicy, (1, 300), Desk(), monkeypatch)

    def timeout(workers: int) -> float:
        elastic.before_controller_execute_resize_decision(ResizeDecision(workers, {"CPU": 1}))
        return float(os.environ[START_TIMEOUT])

    assert 3 <= timeout(2) < timeout(300)
    full = ReschedulingState(training_failed_error=ControllerError(WorkerGroupStartupTimeoutError(2)))
    before = timeout(2)
    elastic.after_controller_state_update(RunningState(), full)
    assert timeout(2) == 2 * before
    for _ in range(20):
        elastic.after_controller_state_update(RunningState(), full)
    assert timeout(2) == scaling.MAX_TIMEOUT_SECONDS
    elastic.after_controller_state_update(full, RunningState())
    assert timeout(2) == before
    assert all(isinstance(message, Placed) for message in elastic.channel.posted)


@pytest.mark.usefixtures("free")
def test_a_group_saves_a_checkpoint_before_it_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT, "3")
    desk = Desk()
    elastic = policy(ElasticPolicy, (1, 3), desk, monkeypatch)
    desk.on_board = Board(training=True, left=True)
    elastic.after_controller_state_update(RunningState(), ResizingState(ResizeDecision(3, {"CPU": 1})))
    elastic.before_controller_execute_resize_decision(ResizeDecision(3, {"CPU": 1}))
    assert desk.asked == [True, False]
    assert desk.posted == [Resize(number=1, workers=3)]
    elastic.before_controller_execute_resize_decision(ResizeDecision(3, {"CPU": 1}))  # an ordinary start
    assert desk.asked == [True, False]
