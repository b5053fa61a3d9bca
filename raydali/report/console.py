"""What a run shows while it runs: live on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_HEADER = "epoch    images  images/s   wait    loss     lr     top-1  top-5  seconds"


class Console:
    """Shows messages from the workers. A line an epoch; on a terminal a progress bar below."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._header_shown = False

    def say(self, text: str) -> None:
        """One line."""
        self._rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """One line that asks for attention."""
        self._rich.print(f"warning: {text}", markup=False, style="yellow")

    def show(self, message: dict[str, Any]) -> None:
        """Show a message of the launcher's mailbox; kinds that are not for people are passed over."""
        handler = getattr(self, f"_show_{message['kind']}", None)
        if handler is not None:
            handler(message)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show_event(self, message: dict[str, Any]) -> None:
        if message["event"] in ("start", "resume"):
            what = "resumed" if message["event"] == "resume" else "started"
            self.say(
                f"{what} at step {message['step']} of {message['steps']}: {message['world_size']} workers on "
                f"{message['device']}, first step after {message['seconds']:.0f} s"
            )
        elif message["event"] == "failure":
            self.warn(f"rank {', '.join(map(str, message['ranks']))} failed: {message['error']}")

    def _show_warning(self, message: dict[str, Any]) -> None:
        self.warn(f"rank {message['rank']}: {message['text']}")

    def _show_progress(self, message: dict[str, Any]) -> None:
        if not self._rich.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("step {task.completed}/{task.total}"),
                TextColumn("{task.fields[rate]:.0f} images/s"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._rich,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=message["steps"], epoch=0, rate=0.0)
            self._last = (time.monotonic(), message["samples_consumed"])
        now, (then, consumed) = time.monotonic(), self._last
        rate = (message["samples_consumed"] - consumed) / max(now - then, 1e-9)
        self._last = (now, message["samples_consumed"])
        self._progress.update(self._task, completed=message["step"], epoch=message["epoch"], rate=rate)

    def _show_epoch(self, message: dict[str, Any]) -> None:
        if not self._header_shown:
            self.say(_HEADER)
            self._header_shown = True
        row = message["record"]
        validation = row["validation"] or {"top1": float("nan"), "top5": float("nan")}
        self.say(
            f"{row['epoch']:5d} {row['images']:9d} {row['images_per_second']:9.0f} {row['loader_wait_fraction']:6.1%} "
            f"{row['loss']:7.4f} {row['learning_rate']:8.2g} {validation['top1']:7.4f} {validation['top5']:6.4f} "
            f"{row['seconds']:8.1f}"
        )
