"""What a run shows while it runs: live on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Heading, name in a record of `epochs.jsonl` or in its validation, width, format.
_COLUMNS = (
    ("epoch", "epoch", 5, "d"),
    ("images", "images", 9, "d"),
    ("images/s", "images_per_second", 9, ".0f"),
    ("ceiling", "of_ceiling", 8, ".1%"),
    ("wait", "loader_wait_fraction", 6, ".1%"),
    ("loss", "loss", 7, ".4f"),
    ("lr", "learning_rate", 8, ".2g"),
)
_OF_CLASSIFIERS = ("top-1", "top1", 7, ".4f"), ("top-5", "top5", 7, ".4f")
_OF_RESTORATION = ("psnr", "psnr", 7, ".2f"), ("of input", "input_psnr", 8, ".2f"), ("ssim", "ssim", 7, ".4f")
_OF_DETECTORS = ("mAP", "map", 7, ".4f"), ("mAP@50", "map_50", 7, ".4f")
_SECONDS = ("seconds", "seconds", 8, ".1f")


class Console:
    """Shows messages from the workers. A line an epoch; on a terminal a progress bar below."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress: tuple[Progress, TaskID] | None = None
        self._last = (0.0, 0)
        self._columns: tuple[tuple[str, str, int, str], ...] = ()

    def say(self, text: str) -> None:
        """One line."""
        self._rich.print(text)

    def warn(self, text: str) -> None:
        """One line that asks for attention."""
        self._rich.print(f"warning: {text}", style="yellow")

    def show(self, message: dict[str, Any]) -> None:
        """Show a message of the launcher's mailbox; kinds that are not for people are passed over."""
        handler = getattr(self, f"_show_{message['kind']}", None)
        if handler is not None:
            handler(message)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress[0].stop()
            self._progress = None

    def _show_event(self, message: dict[str, Any]) -> None:
        if message["event"] in ("start", "resume"):
            what = "resumed" if message["event"] == "resume" else "started"
            workers = f"{message['world_size']} worker{'s' * (message['world_size'] != 1)} on {message['device']}"
            self.say(
                f"{what} at step {message['step']} of {message['steps']}: {workers}, "
                f"first step after {message['seconds']:.0f} s"
            )
        elif message["event"] == "rehearsal" and message["ceiling_images_per_second"]:
            self.say(
                f"ceiling: {message['ceiling_images_per_second']:.0f} images/s with the batch on the device already"
            )
        elif message["event"] == "failure":
            self.warn(f"rank {', '.join(map(str, message['ranks']))} failed: {message['error']}")

    def _show_warning(self, message: dict[str, Any]) -> None:
        self.warn(f"rank {message['rank']}: {message['text']}")

    def _show_progress(self, message: dict[str, Any]) -> None:
        if not self._rich.is_terminal:
            return
        now = time.monotonic(), message["samples_consumed"]
        if self._progress is None:
            bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("step {task.completed}/{task.total}"),
                TextColumn("{task.fields[rate]:.0f} images/s"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._rich,
                transient=True,
            )
            self._progress = bar, bar.add_task("", total=message["steps"], completed=message["step"], epoch=0, rate=0.0)
            self._last = now
            bar.start()
        bar, task = self._progress
        seconds, images = now[0] - self._last[0], now[1] - self._last[1]
        rate = max(images, 0) / seconds if seconds else 0.0  # a resume goes back
        bar.update(task, completed=message["step"], epoch=message["epoch"], rate=rate)
        self._last = now

    def _show_epoch(self, message: dict[str, Any]) -> None:
        record = (message["record"]["validation"] or {}) | message["record"]
        if not self._columns:
            of_task = _OF_RESTORATION if "psnr" in record else _OF_DETECTORS if "map" in record else _OF_CLASSIFIERS
            self._columns = *_COLUMNS, *of_task, _SECONDS
            self.say(" ".join(f"{heading:>{width}}" for heading, _, width, _ in self._columns))
        values = ((record.get(name), width, form) for _, name, width, form in self._columns)
        self.say(" ".join(f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in values))
