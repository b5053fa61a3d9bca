"""The events of a run in report.html: a timeline with a mark for each, and a table of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raydali.report.html.charts import Mark
from raydali.report.html.history import History, number
from raydali.report.html.text import DASH, changed_settings, event, moment, phases, seconds
from raydali.run.events import END_EVENTS, GROUP_END_EVENTS

MAX_EVENTS = 200
"""Limit of the table and of the marks, which show the newest."""
_STYLE = {
    "start": "good",
    "resume": "good",
    "finish": "good",
    "failure": "bad",
    "hang": "bad",
    "stop": "bad",
    "interrupt": "warn",
    "preemption": "warn",
    "resize": "calm",
    "rehearsal": "calm",
}


@dataclass(frozen=True)
class EventRow:
    """An event in the table: seconds since the start, the style of its dot, what happened, and when."""

    after: str
    style: str
    text: str
    at: str


@dataclass(frozen=True)
class Strip:
    """The events on a line of time; positions and widths are in percent of it.

    Attributes:
        spans: style, position and width of each time in which workers started or trained.
        marks: style, position and text of each event.
        begin, length: of the line, as texts.
    """

    spans: list[tuple[str, str, str]]
    marks: list[tuple[str, str, str]]
    begin: str
    length: str

    @property
    def styles(self) -> set[str]:
        """The styles of what is shown, as a legend has them."""
        return {f"span {style}" for style, *_ in self.spans} | {f"dot {style}" for style, *_ in self.marks}


def event_rows(history: History) -> list[EventRow]:
    """The newest events, oldest first."""
    begun = _begun(history)
    rows = []
    for row, text in _described(history):
        time = number(row.get("time"))
        after = DASH if time is None or begun is None else seconds(time - begun)
        rows.append(EventRow(after, _style(row), text, moment(time)))
    return rows


def event_strip(history: History, now: float | None) -> Strip | None:
    """The timeline, or None if no event has a time; `now`: seconds since 1970 while the run goes on, else None."""
    if (begun := _begun(history)) is None:
        return None
    ended = max([*_times(history), now or -math.inf])

    def share(seconds: float) -> str:
        return f"{100 * seconds / ((ended - begun) or 1.0):.2f}"

    return Strip(
        spans=[(style, share(first - begun), share(last - first)) for style, first, last in _spans(history, ended)],
        marks=[
            (_style(row), share(time - begun), f"{text}, after {seconds(time - begun)}")
            for row, text in _described(history)
            if (time := number(row.get("time"))) is not None
        ],
        begin=moment(begun),
        length=seconds(ended - begun),
    )


def _described(history: History) -> list[tuple[Mapping[str, Any], str]]:
    """The newest events with their texts; the text of a start has the number of workers before it."""
    described, size = [], None
    for row in history.events:
        described.append((row, event(row, size) + phases(row)))
        if row.get("event") in ("start", "resume"):
            size = number(row.get("world_size"))
    return described[-MAX_EVENTS:]


def _times(history: History) -> list[float]:
    return [time for row in history.events if (time := number(row.get("time"))) is not None]


def _begun(history: History) -> float | None:
    """When the run began: before its first event, which comes after the first step."""
    return min([*_times(history), *(time - took for time, _, took in history.starts() if took)], default=None)


def _style(row: Mapping[str, Any]) -> str:
    return _STYLE.get(str(row.get("event")), "calm")


def _spans(history: History, ended: float) -> list[tuple[str, float, float]]:
    """Style, begin and end of each time in which workers started or trained, until the event that ended it."""
    ends = sorted(
        time
        for row in history.events
        if row.get("event") in (*GROUP_END_EVENTS, *END_EVENTS) and (time := number(row.get("time"))) is not None
    )
    spans, starts = [], list(history.starts())
    for i, (time, _, took) in enumerate(starts):
        if took:
            spans.append(("starting", time - took, time))
        following = starts[i + 1] if i + 1 < len(starts) else None
        until = following[0] - (following[2] or 0.0) if following else ended
        spans.append(("running", time, max(time, min([until, *(end for end in ends if end > time)]))))
    return spans


def marks(history: History) -> list[Mark]:
    """The resumes, at the boundary of epochs where each happened, for charts over epochs."""
    found: list[Mark] = []
    size: float | None = None
    step_of = [(epoch.number, epoch.get("step")) for epoch in history.epochs]
    changed: list[str] = []
    for row in history.events:
        if row.get("event") == "settings":
            changed.append(changed_settings(row))
        if row.get("event") not in ("start", "resume"):
            continue
        step, before = number(row.get("step")), size
        size = number(row.get("world_size"))
        after = next((epoch for epoch, of in step_of if step is not None and of is not None and of > step), None)
        if row.get("event") == "resume" and after is not None:
            found.append(Mark(after - 0.5, "; ".join([event(row, before), *changed])))
        changed.clear()
    return found[-MAX_EVENTS:]
