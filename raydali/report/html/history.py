"""The data of report.html: a run's settings and events, and for each epoch the numbers that are drawn.

A line of `epochs.jsonl` has all measurements of each rank, 64 kB for 256 ranks. Only the numbers of the whole epoch are
kept, so that the driver of a run adds a line at a time and never reads one again.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from raydali.run.events import END_EVENTS, GROUP_END_EVENTS
from raydali.run.folder import CONFIG, EPOCHS, EVALUATION, EVENTS, SAMPLES, WORST, RunFolder
from raydali.run.ledger import LEDGER, parts_of
from raydali.run.model_file import MODEL

Status = Literal["finished", "ended early", "failed", "interrupted", "broken", "running", "starting", "empty"]

FILES = (SAMPLES, EVALUATION, WORST, MODEL, LEDGER)
"""The files that the page reads as they are."""
VALIDATION = "validation/"
"""Precedes the names of an epoch's numbers that are of its validation."""
_STATUS: dict[object, Status] = {
    "finish": "finished",
    "early end": "ended early",
    "stop": "failed",
    "interrupt": "interrupted",
    "failure": "broken",
    **dict.fromkeys(("preemption", "resize", "rehearsal", "settings", "chosen"), "starting"),
}
"""The status of a run whose last event is this one; with others, it is under way."""


def finite(value: object) -> float | None:
    """The value as a finite number; None for null, text and NaN, which mean "not measured"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True)
class Epoch:
    """A line of `epochs.jsonl`.

    Attributes:
        number: of the epoch, from 0.
        values: the measured numbers by name; names of the validation's begin with VALIDATION.
    """

    number: int
    values: Mapping[str, float]
    verdict: str | None

    def get(self, name: str) -> float | None:
        """Return one of `values`."""
        return self.values.get(name)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Epoch | None":
        """Make it from a line; None if that has no valid epoch number."""
        epoch = finite(record.get("epoch"))
        if epoch is None or not 0 <= epoch < 1e9:
            return None
        values = _numbers(record) | _numbers(record.get("validation"), VALIDATION)
        verdict = record.get("verdict")
        return cls(int(epoch), values, verdict if isinstance(verdict, str) and verdict.strip() else None)


def _numbers(values: object, prefix: str = "") -> dict[str, float]:
    items = values.items() if isinstance(values, Mapping) else ()
    return {f"{prefix}{name}": measured for name, value in items if (measured := finite(value)) is not None}


@dataclass
class History:
    """A run so far.

    Attributes:
        name: the run's name.
        folder: its path or URI.
        settings: what `config.json` holds.
        events: rows of `events.jsonl`.
        epochs: in order; each once, as it was last trained.
        files: the contents of FILES that exist.
    """

    name: str
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: RunFolder) -> "History":
        """Read a run's folder.

        Raises:
            UsageError: a line is broken.
            OSError: the storage does not answer.
            ValueError: config.json is broken.
        """
        history = cls(folder.name, str(folder))
        if folder.exists(CONFIG):
            settings = folder.read_json(CONFIG)
            history.settings = settings if isinstance(settings, dict) else {}
        for row in folder.each_row(EVENTS):
            if isinstance(row, Mapping):
                history.add_event(row)
        for row in folder.each_row(EPOCHS):
            if isinstance(row, Mapping):
                history.add_epoch(row)
        history.files = {file: folder.read(file) for file in FILES if folder.exists(file)}
        return history

    def add_event(self, row: Mapping[str, Any]) -> None:
        """Add a row of `events.jsonl`; a resume removes the epochs that it will train again."""
        self.events.append(row)
        if row.get("event") == "resume":
            self._take_back(finite(row.get("step")))
        elif row.get("event") == "chosen":  # unknown to a driver that read the settings before
            chosen = {name: value for name, value in row.items() if self.settings.get(name, "") is None}
            self.settings = {**self.settings, **chosen}

    def add_epoch(self, record: Mapping[str, Any]) -> None:
        """Add a line of `epochs.jsonl`; it replaces an earlier one of the same epoch."""
        epoch = Epoch.from_record(record)
        if epoch is None:
            return
        step = epoch.get("step")
        self._take_back(None if step is None else step - 1)
        self.epochs.append(epoch)

    def _take_back(self, step: float | None) -> None:
        while step is not None and self.epochs and (self.epochs[-1].get("step") or 0) > step:
            self.epochs.pop()

    @property
    def status(self) -> Status:
        """The run's status, by its last event."""
        if not self.events:
            return "running" if self.epochs else "empty"
        return _STATUS.get(self.events[-1].get("event"), "running")

    def each(self, name: str) -> list[float | None]:
        """Return a number of each epoch."""
        return [epoch.get(name) for epoch in self.epochs]

    def _ratio(self, part: str, *factors: str) -> float | None:
        """Divide the sum of a number by the sum of the product of others, over the epochs that have all of them."""
        rows = [[epoch.get(name) for name in (part, *factors)] for epoch in self.epochs]
        pairs = [(row[0], math.prod(row[1:])) for row in rows if None not in row]  # type: ignore[arg-type]
        whole = sum(product for _, product in pairs)
        return sum(value for value, _ in pairs) / whole if whole > 0 else None  # type: ignore[misc]

    @property
    def seconds(self) -> float | None:
        """Time in epochs; None if it was not measured."""
        measured = [seconds for seconds in self.each("seconds") if seconds is not None]
        return sum(measured) if measured else None

    @property
    def images_per_second(self) -> float | None:
        """Mean rate over all epochs."""
        return self._ratio("images", "seconds")

    @property
    def of_ceiling(self) -> float | None:
        """Share of the ceiling over all epochs with a known ceiling."""
        share = self._ratio("images", "seconds", "ceiling_images_per_second")
        return None if share is None else min(1.0, share)

    @property
    def waiting(self) -> float | None:
        """Share of the time that the ranks waited for the loader, over all epochs."""
        return self._ratio("loader_wait_seconds", "seconds")

    @property
    def metrics(self) -> list[str]:
        """Names of the validation metrics, without the loss; also "broken" if samples of the validation are."""
        names = dict.fromkeys(chain.from_iterable(epoch.values for epoch in self.epochs))
        left_out = {f"{VALIDATION}{name}" for name in ("images", "seconds", "loss")}
        metrics = [name for name in names if name.startswith(VALIDATION) and name not in left_out]
        shown = [name for name in metrics if "/broken" not in name or any(epoch.get(name) for epoch in self.epochs)]
        return [name.removeprefix(VALIDATION) for name in shown]

    @property
    def best(self) -> tuple[str, float, int] | None:
        """Metric, score and epoch of the weights in best/; None if model.json does not say it."""
        with suppress(Exception):  # there is none before the first epoch ends
            best = json.loads(self.files[MODEL])["best"]
            return str(best["metric"]), float(best["score"]), int(best["epoch"])
        return None

    @property
    def ledger(self) -> Mapping[str, Any] | None:
        """The contents of `ledger.json`; None if there is none that can be read."""
        with suppress(Exception):  # there is none before the run ends
            ledger: Mapping[str, Any] = json.loads(self.files[LEDGER])
            if ledger["groups"]:
                parts_of(ledger)
                return ledger
        return None

    def starts(self) -> Iterator[tuple[float, float | None, float | None]]:
        """Return, for each start or resume, (time of its first step, its step number, start-up seconds).

        Start-up is from the start of the driver, or from the end of the previous workers, to the end of the first step;
        None if it is unknown.
        """
        ended = began = -math.inf
        for row in self.events:
            time, kind = finite(row.get("time")), row.get("event")
            if time is None:
                continue
            if kind in GROUP_END_EVENTS:
                ended = time
            elif kind in ("start", "resume"):
                seconds = finite(row.get("seconds"))
                driver = math.nan if seconds is None else time - seconds
                since = ended if ended > driver else driver if began < driver else math.nan
                yield time, finite(row.get("step")), time - since if math.isfinite(since) else None
                ended, began = -math.inf, time
            elif kind in END_EVENTS:
                ended = -math.inf
