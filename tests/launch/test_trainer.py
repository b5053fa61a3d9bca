"""How a worker group ended, by the error of Ray Train."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)

from raydali.launch.channel import Interrupted
from raydali.launch.trainer import end_of, health_check_seconds
from raydali.run.events import Failure, Preemption


def raised(error: Exception) -> Exception:
    """The error of a training function as Ray Train wraps it."""
    return UserExceptionWithTraceback(error, "")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ControllerError(WorkerGroupStartupTimeoutError(2)), "not placed"),
        (
            ControllerError(RuntimeError("the process group was not set up")),
            Failure(ranks=[], killed=[], error="the process group was not set up", starting=True),
        ),
        (OSError("no space"), Failure(ranks=[], killed=[], error="no space", starting=True)),
        (WorkerGroupError("", {0: raised(Interrupted("stop")), 1: raised(Interrupted("stop"))}), "left"),
        (WorkerGroupError("", {1: raised(Interrupted("resize"))}), "left"),
    ],
)
def test_a_group_that_did_not_start_or_has_left(error: Exception, expected: Any) -> None:
    assert end_of(error) == expected


def test_ranks_that_failed_and_ranks_that_died() -> None:
    died = WorkerHealthCheckFailedError("gone", ActorDiedError())
    end = end_of(WorkerGroupError("", {1: died, 0: raised(ValueError("no"))}))
    assert isinstance(end, Failure) and (end.ranks, end.killed) == ([0, 1], [1])


def test_ranks_that_left_before_their_node() -> None:
    end = end_of(WorkerGroupError("", {0: raised(Interrupted("preemption"))}))
    assert isinstance(end, Preemption) and (end.ranks, end.killed) == ([0], [])


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.25), (100, 0.25), (1000, 2.5)])
def test_the_controller_asks_no_more_than_400_workers_a_second(workers: int, seconds: float) -> None:
    assert health_check_seconds(workers) == seconds
