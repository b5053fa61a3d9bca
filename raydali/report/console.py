"""The console of a run: live on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole

from raydali.report.progress_display import Display
from raydali.run.events import (
    BadLoss,
    CheckpointFailed,
    CheckpointRefused,
    Event,
    Failure,
    Hang,
    OptionsChosen,
    Preemption,
    Quarantined,
    RanksDiffer,
    Rehearsed,
    Resize,
    Resumed,
    Started,
    StorageRetried,
)
from raydali.run.messages import EpochEnded, Message, Note, Placed, Progress, RankFigures, RankWarning
from raydali.text import number, numbered, plural, printable, rate_text

_Column = tuple[str, str, int, str]
# Heading, name in a record of `epochs.jsonl` or in its validation, width, format.
_COLUMNS = (
    ("epoch", "epoch", 5, "d"),
    ("images", "images", 8, "d"),
    ("images/s", "images_per_second", 8, "rate"),
    ("ceiling", "of_ceiling", 7, ".1%"),
    ("MFU", "mfu", 5, ".1%"),
    ("wait", "loader_wait_fraction", 5, ".1%"),
    ("cached", "cached", 6, ".1%"),
    ("loss", "loss", 7, ".4f"),
    ("lr", "learning_rate", 7, ".2g"),
)
_IF_MEASURED = "mfu", "cached"
_OF_TASKS: dict[str, tuple[_Column, ...]] = {
    "top1": (("top-1", "top1", 6, ".4f"), ("top-5", "top5", 6, ".4f")),
    "psnr": (("psnr", "psnr", 5, ".2f"), ("input", "input_psnr", 5, ".2f"), ("ssim", "ssim", 6, ".4f")),
    "map_50": (("mAP", "map", 6, ".4f"), ("mAP@50", "map_50", 6, ".4f")),
    "map": (("mAP", "map", 6, ".4f"), ("accuracy", "accuracy", 8, ".4f")),
}
"""Columns by the first metric that a task has. Other jobs' metrics are shown by their names."""
CONTINUES = "training continues to the next checkpoint"
"""In the line of each checkpoint that could not be written."""
_NOT_OF_TASK = "images", "loss", "seconds", "broken"
_MOST_OF_OWN_JOB = 3
_SECONDS = ("seconds", "seconds", 7, ".1f")
_LEFT_OUT_FIRST = "MFU", "cached", "images", "lr", "input"
"""Columns to omit on a narrow terminal, in this order; 80 characters suffice for all."""

QUARANTINED_SHOWN = 5
"""Limit of broken samples that have a warning of their own."""


def _cell(value: float | None, form: str) -> str:
    return rate_text(value) if form == "rate" and value is not None else number(value, form)


class Console:
    """Shows messages from the workers: a line for each epoch. Between them progress_display.py shows progress."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._display = Display(self._rich)
        self._quarantined = 0
        self._columns: tuple[_Column, ...] = ()
        self._has_metrics = False
        self._verdicts: set[str] = set()

    def print(self, text: str) -> None:
        """Print one line of text."""
        self._rich.print(printable(text, lines=True))

    def warn(self, text: str) -> None:
        """Print one line as a warning."""
        self._rich.print(printable(f"warning: {text}", lines=True), style="yellow")

    def show(self, message: Message) -> None:
        """Show a message from the workers; internal ones are ignored."""
        match message:
            case Note():
                self.print(message.text)
            case RankWarning():
                self.warn(f"rank {message.rank}: {message.text}")
            case Placed(workers, maximum):
                self.print(f"starting {workers} of at most {plural(maximum, 'worker')}: there is no room for more")
            case Progress():
                self._display.progress(message)
            case RankFigures():
                self._display.figures(message)
            case EpochEnded():
                self._show_epoch(message.record)
            case Event():
                self._show_event(message)

    def ledger(self, summary: Mapping[str, Any]) -> None:
        """Take the run's ledger, for the cost that the progress shows."""
        self._display.ledger(summary)

    def close(self) -> None:
        """Remove the live display."""
        self._display.close()

    def _show_event(self, event: Event) -> None:
        match event:
            case Started():
                self._display.forget_ranks()
                what = "resumed" if isinstance(event, Resumed) else "started"
                workers = f"{plural(event.world_size, 'worker')} on {event.device}"
                seconds = f"first step after {event.seconds or 0:.0f} s"
                self.print(f"{what} at step {event.step} of {event.steps}: {workers}, {seconds}")
            case Rehearsed(ceiling_images_per_second=float() as rate):
                self.print(f"ceiling: {rate_text(rate)} images/s with the batch already on the device")
            case OptionsChosen(options=options):
                chosen = [f"--precision {options['precision']}"] if "precision" in options else []
                chosen += [f"--{name}" for name in ("compile", "fused") if options.get(name)]
                if chosen:  # a CPU compiles and fuses nothing, which needs no line
                    self.print(f"chosen for this hardware, and kept by resumes: {' '.join(chosen)}")
            case Failure():
                self._show_failure(event)
            case Resize():
                self.print(f"continuing with {plural(event.workers, 'worker')} from the newest checkpoint")
            case Preemption():
                self.warn("a node is being taken away: continuing from the newest checkpoint")
            case Hang():
                what = "the first step does not end" if event.starting else "training makes no progress"
                for rank in event.ranks:
                    where = f"rank {rank.rank} (node {rank.node}, process {rank.pid})"
                    doing, stack = ("frozen", "") if rank.frozen else ("stuck", f":\n{rank.stack or ''}".rstrip("\n:"))
                    self.warn(f"{what}, since {where} is {doing}: its process is killed{stack}")
            case CheckpointFailed():
                self.warn(f"{event.path} cannot be written: {event.reason}; {CONTINUES}")
            case CheckpointRefused():
                self.warn(f"{event.path} cannot be used: {event.reason}; trying the previous checkpoint")
            case RanksDiffer(recomputed=True):  # otherwise the failure tells
                self.warn(event.text)
            case Quarantined():
                self._show_quarantined(event)
            case BadLoss():
                effect = "it is left out" if event.left_out else "training goes on"
                self.warn(f"step {event.step} is bad, {event.why}: {effect}; {event.command} shows it")
            case StorageRetried():
                waited = f"{plural(len(event.ranks), 'rank')} waited {event.waited_seconds:.1f} s"
                self.warn(f"{event.path} did not answer ({event.reason}): {waited}")

    def _show_failure(self, failure: Failure) -> None:
        who = f"{numbered('rank', failure.ranks)} failed: " if failure.ranks else "the workers did not start: "
        self.warn(f"{'' if failure.killed else who}{failure.error}")
        if failure.left_out:
            self.warn(f"no worker starts on {', '.join(f'node {node}' for node in failure.left_out)} from now on")
        if failure.pause:
            self.print(f"restarting from the newest checkpoint in {failure.pause:.0f} s")

    def _show_quarantined(self, event: Quarantined) -> None:
        self._quarantined += 1
        if self._quarantined <= QUARANTINED_SHOWN:
            other = "" if event.replaced_by is None else f"; sample {event.replaced_by} replaces it"
            effect = "; it is left out" if event.of.startswith("validation") else other
            self.warn(f"{event.of} sample {event.id} is broken: {event.path}: {event.reason}{effect}")
        elif self._quarantined == QUARANTINED_SHOWN + 1:
            self.warn("more samples are broken: events.jsonl lists all of them")

    def _show_epoch(self, record: Mapping[str, Any]) -> None:
        metrics = record["validation"] or {}
        if not self._columns or (metrics and not self._has_metrics):  # with --validate-every, the first has none
            self._has_metrics = bool(metrics)
            own = [name for name, value in metrics.items() if isinstance(value, float) and name not in _NOT_OF_TASK]
            of_own_job = tuple((name, name, max(6, len(name)), ".4f") for name in own[:_MOST_OF_OWN_JOB])
            of_task = next((columns for name, columns in _OF_TASKS.items() if name in metrics), of_own_job)
            base = (column for column in _COLUMNS if column[1] not in _IF_MEASURED or record.get(column[1]) is not None)
            measured = (column for column in of_task if column[1] in metrics)
            self._columns = self._fitting((*base, *measured, _SECONDS))
            self.print(" ".join(f"{heading:>{width}}" for heading, _, width, _ in self._columns))
        record = {**metrics, **record}
        self.print(" ".join(f"{_cell(record.get(name), form):>{width}}" for _, name, width, form in self._columns))
        self._show_verdict(record.get("verdict"))
        self._display.epoch(record)

    def _fitting(self, columns: tuple[_Column, ...]) -> tuple[_Column, ...]:
        for name in _LEFT_OUT_FIRST if self._rich.is_terminal else ():
            if sum(width + 1 for _, _, width, _ in columns) - 1 > self._rich.width:
                columns = tuple(column for column in columns if column[0] != name)
        return columns

    def _show_verdict(self, verdict: str | None) -> None:
        """Print a verdict below the first epoch that it applies to, once for each cause."""
        headline = (verdict or "").partition(":")[0]
        if verdict and headline not in self._verdicts:
            self.print(f"      {verdict}")
            self._verdicts.add(headline)
