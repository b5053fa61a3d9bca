"""What a run shows while it runs: live on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole

from raydali.report.progress_display import Display, in_digits

_Column = tuple[str, str, int, str]
# Heading, name in a record of `epochs.jsonl` or in its validation, width, format.
_COLUMNS = (
    ("epoch", "epoch", 5, "d"),
    ("images", "images", 8, "d"),
    ("images/s", "images_per_second", 8, "rate"),
    ("ceiling", "of_ceiling", 7, ".1%"),
    ("wait", "loader_wait_fraction", 5, ".1%"),
    ("loss", "loss", 7, ".4f"),
    ("lr", "learning_rate", 7, ".2g"),
)
_OF_CLASSIFIERS = ("top-1", "top1", 6, ".4f"), ("top-5", "top5", 6, ".4f")
_OF_RESTORATION = ("psnr", "psnr", 5, ".2f"), ("input", "input_psnr", 5, ".2f"), ("ssim", "ssim", 6, ".4f")
_OF_DETECTORS = ("mAP", "map", 6, ".4f"), ("mAP@50", "map_50", 6, ".4f")
_SECONDS = ("seconds", "seconds", 7, ".1f")
_LEFT_OUT_FIRST = "images", "lr", "input"
"""On a terminal too narrow for all; 80 columns are enough."""

QUARANTINED_SHOWN = 5
"""Broken samples that are warned about one by one."""


def _of_broken(event: Mapping[str, Any]) -> str:
    """What the event of a broken sample says, in words."""
    other = "" if event["replaced_by"] is None else f"; sample {event['replaced_by']} is read in its place"
    out = "; it is left out" if event["of"].startswith("validation") else other
    return f"{event['of']} sample {event['id']} is broken: {event['path']}: {event['reason']}{out}"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return in_digits(value) if form == "rate" else format(value, form)


class Console:
    """Shows messages from the workers. A line an epoch; what goes on between, progress_display.py shows."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._display = Display(self._rich)
        self._quarantined = 0
        self._columns: tuple[_Column, ...] = ()
        self._verdicts: set[str] = set()

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
        """Take the display away."""
        self._display.close()

    def _show_event(self, message: dict[str, Any]) -> None:
        if message["event"] in ("start", "resume"):
            self._display.restart()
            what = "resumed" if message["event"] == "resume" else "started"
            workers = f"{message['world_size']} worker{'s' * (message['world_size'] != 1)} on {message['device']}"
            self.say(
                f"{what} at step {message['step']} of {message['steps']}: {workers}, "
                f"first step after {message['seconds']:.0f} s"
            )
        elif message["event"] in ("rehearsal", "ceiling") and message["ceiling_images_per_second"]:
            rate = in_digits(message["ceiling_images_per_second"])
            self.say(f"ceiling: {rate} images/s with the batch on the device already")
        elif message["event"] == "chosen":
            options = [f"--precision {message['precision']}"] if "precision" in message else []
            options += ["--compile"] * bool(message.get("compile"))
            if options:  # that a CPU compiles nothing is no news
                self.say(f"chosen for this hardware, and kept: {' '.join(options)}")
        elif message["event"] == "failure":
            self._show_failure(message)
        elif message["event"] == "resize":
            self.say(f"going on with {message['workers']} workers, from the newest checkpoint")
        elif message["event"] == "preemption":
            self.warn("a node is taken away: going on from the newest checkpoint")
        elif message["event"] == "hang":
            what = "there is no first step" if message["starting"] else "training stands still"
            for each in message["ranks"]:
                where = f"rank {each['rank']} (node {each['node']}, process {each['pid']})"
                doing = "is frozen" if each["frozen"] else f"does not get on:\n{each['stack'] or ''}".rstrip()
                self.warn(f"{what}, and {where} {doing}: starting again from the newest checkpoint")
        elif message["event"] == "checkpoint failed":
            self.warn(f"{message['path']} could not be saved: {message['reason']}; training goes on, the next is tried")
        elif message["event"] == "quarantine":
            self._quarantined += 1
            if self._quarantined <= QUARANTINED_SHOWN:
                self.warn(_of_broken(message))
            elif self._quarantined == QUARANTINED_SHOWN + 1:
                self.warn("more samples are broken: events.jsonl names them all")
        elif message["event"] == "storage retry":
            count = len(message["ranks"])
            waited = f"{count} rank{'s' * (count != 1)} waited {message['waited_seconds']:.1f} s"
            self.warn(f"{message['path']} did not answer ({message['reason']}): {waited}")
        elif message["event"] == "bad checkpoint":
            self.warn(f"{message['path']} cannot be used: {message['reason']}; taking the one before")

    def _show_failure(self, message: Mapping[str, Any]) -> None:
        ranks = ", ".join(map(str, message["ranks"]))
        who = f"rank {ranks} failed: " if ranks else "workers failed to start: "
        self.warn(f"{'' if message.get('killed') else who}{message['error']}")
        if message.get("left_out"):
            self.warn(f"node {', '.join(message['left_out'])} is left out from now on")
        if message.get("pause"):
            self.say(f"starting again in {message['pause']:.0f} s, from the newest checkpoint")

    def _show_placed(self, message: Mapping[str, Any]) -> None:
        self.say(f"starting {message['workers']} of up to {message['most']} workers: there is no room for more now")

    def _show_note(self, message: dict[str, Any]) -> None:
        self.say(message["text"])

    def _show_warning(self, message: dict[str, Any]) -> None:
        self.warn(f"rank {message['rank']}: {message['text']}")

    def _show_progress(self, message: dict[str, Any]) -> None:
        self._display.progress(message)

    def _show_pulse(self, message: dict[str, Any]) -> None:
        self._display.pulse(message)

    def _show_epoch(self, message: dict[str, Any]) -> None:
        record = (message["record"]["validation"] or {}) | message["record"]
        if not self._columns:
            of_task = _OF_RESTORATION if "psnr" in record else _OF_DETECTORS if "map" in record else _OF_CLASSIFIERS
            self._columns = self._fitting((*_COLUMNS, *of_task, _SECONDS))
            self.say(" ".join(f"{heading:>{width}}" for heading, _, width, _ in self._columns))
        self.say(" ".join(f"{_cell(record.get(name), form):>{width}}" for _, name, width, form in self._columns))
        self._show_verdict(record.get("verdict"))
        self._display.epoch(record)

    def _fitting(self, columns: tuple[_Column, ...]) -> tuple[_Column, ...]:
        for name in _LEFT_OUT_FIRST if self._rich.is_terminal else ():
            if sum(width + 1 for _, _, width, _ in columns) - 1 > self._rich.width:
                columns = tuple(column for column in columns if column[0] != name)
        return columns

    def _show_verdict(self, verdict: str | None) -> None:
        """Below the first epoch that it speaks of: once for each cause."""
        headline = (verdict or "").partition(":")[0]
        if verdict and headline not in self._verdicts:
            self.say(f"      {verdict}")
            self._verdicts.add(headline)
