"""Progress between the lines of epochs: updated in place on a terminal, elsewhere a plain line every 30 seconds.

It receives rank 0's progress twice a second, and each rank's figures every few seconds.
"""

import time
from collections import deque
from collections.abc import Mapping
from math import inf
from statistics import fmean, median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from raydali.measure.records import Figures
from raydali.run.messages import Progress, RankFigures
from raydali.text import rate_text

RATE_WINDOW_SECONDS = 10.0
"""Window of the current rate in images a second."""
LINE_SECONDS = 30.0
"""Interval of plain lines."""
STRAGGLER_MARGIN = 0.15
"""A rank is a straggler if its loader-wait fraction exceeds the median by 0.15, or its own step time by 15%."""
MAX_STRAGGLERS = 4
FORWARD_SHARE = 0.4
"""The time of a validation sample as a share of a training sample's time: a third of the operations of a step, and the
start of the loader."""
REFRESHES_PER_SECOND = 1
BAR_WIDTH = 40


class Display:
    """The driver's display of the current run.

    Args:
        console: a terminal gets a live display, anything else plain lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._begin()

    def _begin(self) -> None:
        self._latest: Progress | None = None
        self._first_seconds = self._printed_seconds = 0.0
        self._first_consumed = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._figures: dict[int, Figures] = {}
        self._loss: float | None = None
        self._verdict = ""
        self._validated: list[float] = []  # seconds of each validation since the first progress
        self._cost: tuple[float, float] | None = None  # so far, and of a second

    def progress(self, message: Progress) -> None:
        """Store rank 0's progress, and show it when it is time."""
        now, consumed = time.monotonic(), message.samples_consumed
        if self._latest is None or consumed < self._latest.samples_consumed:  # after a resume, progress may jump back
            self._first_seconds, self._first_consumed = now, consumed
            self._recent.clear()
            self._validated.clear()
            self._printed_seconds = now
        self._latest = message
        self._recent.append((now, consumed))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_WINDOW_SECONDS:
            self._recent.popleft()
        if not self._console.is_terminal:
            if now - self._printed_seconds >= LINE_SECONDS:
                self._printed_seconds = now
                self._console.print(self.line())
        elif self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                transient=True,
                refresh_per_second=REFRESHES_PER_SECOND,
            )
            self._live.start()

    def figures(self, message: RankFigures) -> None:
        """Store the figures of a rank."""
        self._figures[message.rank] = message.figures

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Store the loss, the verdict and the validation of an epoch."""
        if seconds := (record.get("validation") or {}).get("seconds"):
            self._validated.append(seconds)
        self._loss, self._verdict = record.get("loss"), (record.get("verdict") or "").partition(":")[0]

    def ledger(self, summary: Mapping[str, Any]) -> None:
        """Store the cost of the run so far, and the cost of a second."""
        if summary["cost_usd"] is not None:
            held = sum(group["workers"] for group in summary["groups"] if group["released"] is None)
            self._cost = summary["cost_usd"], held * summary["price_usd_per_gpu_hour"] / 3600

    def seconds_left(self) -> float | None:
        """Return an estimate of the time until the end of the run; None before there is a rate.

        It adds up the steps and the validations that are left. Before the first validation, a sample of it is assumed
        to take a part of the time of a step's sample.
        """
        at, (now, consumed) = self._latest, self._recent[-1]
        trained = consumed - self._first_consumed
        seconds = now - self._first_seconds - sum(self._validated)
        if at is None or not at.step or trained <= 0 or seconds <= 0:
            return None
        pace = seconds / trained
        validation = fmean(self._validated) if self._validated else FORWARD_SHARE * pace * at.validation_samples
        return consumed * (at.steps / at.step - 1) * pace + at.validations * validation

    def forget_ranks(self) -> None:
        """Delete the figures of all ranks: after a restart, some of them may not exist any more."""
        self._figures.clear()

    def close(self) -> None:
        """Remove the live display, and reset."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._begin()

    def refresh(self) -> None:
        """Draw the display now."""
        if self._live is not None:
            self._live.refresh()

    def line(self) -> str:
        """Return the progress in one line."""
        at = self._latest
        return "" if at is None else f"epoch {at.epoch}, step {at.step} of {at.steps}: {', '.join(self._facts())}"

    def stragglers(self) -> list[str]:
        """A line for each rank that waits long for its loader, then for each with slow steps; each time worst first."""
        waits, steps = self._each("loader_wait_fraction"), self._each("own_step_seconds")
        usual, pace = (median(values.values()) if len(values) > 1 else inf for values in (waits, steps))
        lines = [
            f"rank {rank} waits for its loader {wait:.0%} of the time, the median {usual:.0%}"
            for rank, wait in sorted(waits.items(), key=lambda item: -item[1])
            if wait - usual >= STRAGGLER_MARGIN
        ] + [
            f"rank {rank} takes {seconds:.3g} s for its part of a step, the median {pace:.3g} s"
            for rank, seconds in sorted(steps.items(), key=lambda item: -item[1])
            if seconds >= pace * (1 + STRAGGLER_MARGIN)
        ]
        rest = len(lines) - MAX_STRAGGLERS
        return lines if rest <= 0 else [*lines[:MAX_STRAGGLERS], f"and {rest} more"]

    def _each(self, name: str) -> dict[int, float]:
        """A figure by rank, without the ranks that have not measured it."""
        values = {rank: getattr(figures, name) for rank, figures in self._figures.items()}
        return {rank: value for rank, value in values.items() if value is not None}

    def _facts(self) -> list[str]:
        assert self._latest is not None
        (began, before), (now, consumed) = self._recent[0], self._recent[-1]
        mean = _rate(consumed - self._first_consumed, now - self._first_seconds)
        facts = [f"{rate_text(_rate(consumed - before, now - began))} images/s (mean {rate_text(mean)})"]
        if waits := self._each("loader_wait_fraction").values():
            facts.append(f"wait {fmean(waits):.0%}")
        if of_ceiling := self._each("of_ceiling").values():
            facts.append(f"{fmean(of_ceiling):.0%} of the ceiling")
        losses = self._each("loss").values()
        if losses or self._loss is not None:
            facts.append(f"loss {fmean(losses) if losses else self._loss:.4f}")
        if (remaining := self.seconds_left()) is not None:
            facts.append(f"{_estimate(remaining)} left")
            if self._cost is not None:
                facts.append(f"${self._cost[0] + remaining * self._cost[1]:.2f} at the end")
        if self._verdict:
            facts.append(self._verdict)
        return facts

    def _render(self) -> RenderableType:
        at = self._latest
        if at is None:
            return Text()
        epoch, run = f"epoch {at.epoch}", at.step / at.steps
        share, steps = _share_of_epoch(at), f"step {at.step}/{at.steps}"
        bars = [(epoch, run, steps)] if share is None else [(epoch, share, f"{share:.0%}"), ("run", run, steps)]
        room = self._console.width - len(epoch) - max(len(text) for _, _, text in bars) - 2
        drawn = [_bar(name.ljust(len(epoch)), part, text, min(room, BAR_WIDTH)) for name, part, text in bars]
        lines = [", ".join(self._facts()), *self.stragglers()]
        # Wrapped between words: a terminal would wrap within them.
        return Group(*drawn, *(Text(text, no_wrap=False, overflow="fold") for text in lines))


def _bar(name: str, share: float, text: str, width: int) -> Text:
    # A table of rich's progress bars looks the same, and takes twice as long as the whole display.
    full = round(share * width)
    parts = ("\u2501" * full, "bar.complete"), ("\u2500" * (width - full), "bar.back")
    return Text.assemble(f"{name} ", *parts, f" {text}", no_wrap=True, overflow="crop")


def _share_of_epoch(at: Progress) -> float | None:
    if not at.epochs or not at.step:
        return None
    return min(1.0, max(0.0, at.step / at.steps * at.epochs - at.epoch))


def _rate(images: int, seconds: float) -> float:
    return images / seconds if seconds > 0 else 0.0


def _estimate(seconds: float) -> str:
    """A duration in one unit: it is an estimate."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
