"""What Ray Train's controller knows and the workers cannot tell: that one of them is dead."""

from typing import Any

from ray.train import Checkpoint, UserCallback

from raydali.launch.mailbox import Mailbox
from raydali.launch.notices import Interrupted


class Watcher(UserCallback):
    """Runs in the controller; posts each end of a worker group before its time as an event."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Nothing: rank 0 writes the epochs itself."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Post which ranks failed, which of them were killed, and the last line of why; preemptions apart."""
        killed = {rank for rank, error in worker_exceptions.items() if hasattr(error, "health_check_failure")}
        lines = {line for error in worker_exceptions.values() for line in str(error).strip().splitlines()[-1:]}
        causes = [getattr(error, "_base_exc", error) for error in worker_exceptions.values()]
        notices = {cause.notice for cause in causes if isinstance(cause, Interrupted)}
        if "stop" in notices:  # as the driver wanted
            return
        preempted = bool(notices) or any(map(_is_preempted, causes))
        self._mailbox.post(
            kind="event",
            event="preemption" if preempted else "failure",
            ranks=sorted(worker_exceptions),
            killed=sorted(killed),
            error="left behind a checkpoint" if notices else "; ".join(sorted(lines)),
        )


def _is_preempted(error: Exception) -> bool:
    """Whether a worker died since its node was taken away."""
    return bool(getattr(getattr(error, "health_check_failure", error), "preempted", False))
