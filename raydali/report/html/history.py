"""The data of report.html: a run's settings and events, and for each epoch the numbers that are drawn.

A line of `epochs.jsonl` has all measurements of each rank, 64 kB for 256 ranks. Only the numbers of the whole epoch are
kept, so that the driver of a run adds a line at a time and never reads one again.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from raydali.measure.ceiling import VOID_ABOVE
from raydali.run.events import END_EVENTS, GROUP_END_EVENTS
from raydali.run.folder import CONFIG, EPOCHS, EVALUATION, EVENTS, SAMPLES, WORST, RunFolder
from raydali.run.model_file import MODEL

Status = Literal["finished", "failed", "interrupted", "broken", "running", "starting", "empty"]

NAN = math.nan
FILES = {"samples": SAMPLES, "evaluation": EVALUATION, "worst": WORST, "model": MODEL}
"""The files that the page reads as they are, by the names of their attributes in `History`."""


def number(value: object) -> float | None:
    """The value as a finite number; None for null, text and NaN, which mean "not measured"."""
    if type(value) is float:  # nearly all are
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


@dataclass(frozen=True, slots=True)
class Epoch:
    """A line of `epochs.jsonl`.

    Attributes:
        number: of the epoch, from 0.
        values: the line's own measured numbers by name.
        validation: the numbers of its validation by name.
    """

    number: int
    values: Mapping[str, float]
    validation: Mapping[str, float]
    verdict: str | None

    def get(self, name: str) -> float | None:
        """Return one of `values`."""
        return self.values.get(name)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Epoch | None":
        """Make it from a line; None if that has no valid epoch number."""
        epoch = number(record.get("epoch"))
        if epoch is None or not 0 <= epoch < 1e9:
            return None
        verdict = record.get("verdict")
        return cls(
            int(epoch),
            _without_void_ceiling(_numbers(record)),
            _numbers(record.get("validation")),
            verdict if isinstance(verdict, str) and verdict.strip() else None,
        )


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    found = {str(name): number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _without_void_ceiling(values: dict[str, float]) -> dict[str, float]:
    """Limit the share of the ceiling to 1; remove a ceiling that an earlier version measured on a busy machine."""
    if values.get("of_ceiling", 0.0) > VOID_ABOVE:
        del values["of_ceiling"]
        values.pop("ceiling_images_per_second", None)
    return {name: min(value, 1.0) if name == "of_ceiling" else value for name, value in values.items()}


@dataclass
class History:
    """A run so far.

    Attributes:
        name: the run's name.
        folder: its path or URI.
        settings: what `config.json` holds.
        events: rows of `events.jsonl`.
        epochs: in order; each once, as it was last trained.
        samples, evaluation, worst, model: the contents of FILES that exist.
    """

    name: str
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    samples: bytes | None = None
    evaluation: bytes | None = None
    worst: bytes | None = None
    model: bytes | None = None

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
        for name, file in FILES.items():
            if folder.exists(file):
                setattr(history, name, folder.read(file))
        return history

    def add_event(self, row: Mapping[str, Any]) -> None:
        """Add a row of `events.jsonl`; a resume removes the epochs that it will train again."""
        self.events.append(row)
        if row.get("event") == "resume":
            self._take_back(number(row.get("step")))
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
        last = self.events[-1].get("event")
        by_event: dict[object, Status] = {
            "finish": "finished",
            "stop": "failed",
            "interrupt": "interrupted",
            "failure": "broken",
            "preemption": "starting",
            "resize": "starting",
            "rehearsal": "starting",
            "settings": "starting",
            "chosen": "starting",
        }
        return by_event.get(last, "running")

    def sum(self, name: str, *others: str) -> tuple[float, ...] | None:
        """Sums over the epochs that have all of these numbers; None if there is no such epoch."""
        names = (name, *others)
        rows = [[epoch.values[name] for name in names] for epoch in self.epochs if epoch.values.keys() >= set(names)]
        return tuple(map(sum, zip(*rows, strict=True))) if rows else None

    @property
    def images_per_second(self) -> float | None:
        """Mean rate over all epochs."""
        sums = self.sum("images", "seconds")
        return sums[0] / sums[1] if sums and sums[1] > 0 else None

    @property
    def of_ceiling(self) -> float | None:
        """Share of the ceiling over all epochs with a known ceiling."""
        rows = [(e.get("images"), e.get("seconds"), e.get("ceiling_images_per_second")) for e in self.epochs]
        known = [(images, seconds * ceiling) for images, seconds, ceiling in rows if images and seconds and ceiling]
        return (
            min(1.0, sum(images for images, _ in known) / sum(at_ceiling for _, at_ceiling in known)) if known else None
        )

    @property
    def waiting(self) -> float | None:
        """Share of the time that the ranks waited for the loader, over all epochs."""
        sums = self.sum("loader_wait_seconds", "seconds")
        return sums[0] / sums[1] if sums and sums[1] > 0 else None

    @property
    def metrics(self) -> list[str]:
        """Names of the validation metrics, without the loss; also "broken" if samples of the validation are."""
        values = (item for epoch in self.epochs for item in epoch.validation.items())
        names = dict.fromkeys(name for name, value in values if value or name != "broken")
        return [name for name in names if name not in ("images", "seconds", "loss")]

    @property
    def best(self) -> tuple[str, float, int] | None:
        """Metric, score and epoch of the weights in best/; None if model.json does not say it."""
        with suppress(Exception):  # runs of earlier versions have none
            found = json.loads(self.model or b"null")["best"]
            return str(found["metric"]), float(found["score"]), int(found["epoch"])
        return None

    @property
    def top1(self) -> float | None:
        """The accuracy after the newest epoch, if it was measured."""
        return self.epochs[-1].validation.get("top1") if self.epochs else None

    def starts(self) -> Iterator[tuple[float, float | None, float | None]]:
        """Return, for each start or resume, (time of its first step, its step number, start-up seconds).

        Start-up is from the start of the driver, or from the end of the previous workers, to the end of the first step;
        None if it is unknown.
        """
        ended = began = -math.inf
        for row in self.events:
            time, kind = number(row.get("time")), row.get("event")
            if time is None:
                continue
            if kind in GROUP_END_EVENTS:
                ended = time
            elif kind in ("start", "resume"):
                seconds = number(row.get("seconds"))
                driver = NAN if seconds is None else time - seconds
                since = ended if ended > driver else driver if began < driver else NAN
                yield time, number(row.get("step")), time - since if math.isfinite(since) else None
                ended, began = -math.inf, time
            elif kind in END_EVENTS:
                ended = -math.inf
