"""What Ray Train's controller knows and the workers cannot tell: that one of them is dead."""

from typing import Any

from ray.train import Checkpoint, UserCallback

from raydali.launch.mailbox import Mailbox


class Watcher(UserCallback):
    """Runs in the controller; posts each failure of the worker group as an event."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Nothing: rank 0 writes the epochs itself."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Post which ranks failed, and the last line of why."""
        failures = {rank: str(error).strip().splitlines()[-1:] for rank, error in worker_exceptions.items()}
        self._mailbox.post(
            kind="event",
            event="failure",
            ranks=sorted(failures),
            error="; ".join(sorted({line for lines in failures.values() for line in lines})),
        )
