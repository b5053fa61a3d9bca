"""The early end of a worker group, as Ray Train's controller sees it."""

from collections.abc import Mapping

from ray.train import PreemptionError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    RestartingState,
    TrainControllerState,
)

from raydali.launch.channel import Interrupted
from raydali.run.events import Failure, Preemption, WorkerAddress
from raydali.text import error_line


def only_waits(state: TrainControllerState) -> bool:
    """Return whether workers did not start for lack of resources. This is no failure: Ray Train retries their start."""
    cause = getattr(getattr(state, "training_failed_error", None), "controller_failure", None)
    return isinstance(state, ReschedulingState) and isinstance(cause, WorkerGroupStartupTimeoutError)


def end_of(state: TrainControllerState, places: Mapping[int, WorkerAddress]) -> Failure | Preemption | None:
    """Return the early end of a worker group that led to this state, or None.

    None means that no group has ended, or that the driver requested the end.

    Args:
        state: the controller's new state.
        places: where each rank of the group ran.
    """
    if isinstance(state, ReschedulingState):
        error = state.training_failed_error
        cause = getattr(error, "controller_failure", error)
        return Failure(ranks=[], killed=[], error=error_line(cause), starting=True)
    if not isinstance(state, RestartingState):
        return None
    end = state.training_failed_error
    if isinstance(end, PreemptionError):
        return Preemption(ranks=sorted(end.preemption_info.preempted_ranks), error=error_line(end))
    errors: dict[int, Exception] = getattr(end, "worker_failures", {})
    killed = sorted(rank for rank, error in errors.items() if hasattr(error, "health_check_failure"))
    causes = [getattr(error, "_base_exc", error) for error in errors.values()]
    notices = {cause.notice for cause in causes if isinstance(cause, Interrupted)}
    if "stop" in notices:
        return None
    lines = "; ".join(sorted({error_line(error) for error in errors.values()} - {""})) or error_line(end)
    end_type = Preemption if notices or any(map(_is_preempted, causes)) else Failure
    return end_type(
        ranks=sorted(errors),
        killed=killed,
        places={rank: places[rank] for rank in sorted(errors) if rank in places},
        error="left after a checkpoint" if notices else lines,
    )


def _is_preempted(error: Exception) -> bool:
    """Return whether a worker died because its node was taken away."""
    return bool(getattr(getattr(error, "health_check_failure", error), "preempted", False))
