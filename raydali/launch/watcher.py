"""What Ray Train's controller knows and the workers cannot tell: that a group of them has come to its end, and why."""

from typing import Any

from ray.train import PreemptionError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    ResizingState,
    RestartingState,
    TrainControllerState,
)

from raydali.launch.mailbox import Mailbox
from raydali.launch.notices import Interrupted


class Watcher(ControllerCallback):
    """Runs in the controller; posts each end of a worker group before its time as one event: "failure", "preemption",
    or "resize". Ray's public callback hears of workers' errors alone, and of a preemption at every look."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        """See Ray."""
        if isinstance(current_state, RestartingState):
            self._post_end(current_state.training_failed_error)
        elif isinstance(current_state, ReschedulingState):
            cause = getattr(current_state.training_failed_error, "controller_failure", None)
            if not isinstance(cause, WorkerGroupStartupTimeoutError):  # which only waits for places
                self._post("failure", error=_last_line(cause), starting=True)
        elif isinstance(current_state, ResizingState):
            self._post("resize", workers=getattr(current_state.scaling_decision, "num_workers", 0))

    def _post_end(self, end: Exception) -> None:
        """Which ranks failed, which of them were killed, and the last line of why."""
        if isinstance(end, PreemptionError):
            self._post("preemption", ranks=sorted(end.preemption_info.preempted_ranks), error=_last_line(end))
            return
        errors: dict[int, Exception] = getattr(end, "worker_failures", {})
        killed = {rank for rank, error in errors.items() if hasattr(error, "health_check_failure")}
        causes = [getattr(error, "_base_exc", error) for error in errors.values()]
        notices = {cause.notice for cause in causes if isinstance(cause, Interrupted)}
        if "stop" in notices:  # as the driver wanted
            return
        lines = "; ".join(sorted({_last_line(error) for error in errors.values()} - {""}))
        self._post(
            "preemption" if notices or any(map(_is_preempted, causes)) else "failure",
            ranks=sorted(errors),
            killed=sorted(killed),
            error="left behind a checkpoint" if notices else lines,
        )

    def _post(self, event: str, **facts: Any) -> None:
        self._mailbox.post(
            kind="event", event=event, **({"ranks": [], "killed": []} if event == "failure" else {}) | facts
        )


def _last_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()[-1:]), "")


def _is_preempted(error: Exception) -> bool:
    """Whether a worker died since its node was taken away."""
    return bool(getattr(getattr(error, "health_check_failure", error), "preempted", False))
