"""The events of a run in report.html: a sentence for each, a timeline with their marks, and a table of them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydali.report.html.charts import Mark
from raydali.report.html.history import History, number
from raydali.report.html.text import DASH, count, figure, many, moment, seconds, shortened, shown
from raydali.run.events import END_EVENTS, GROUP_END_EVENTS
from raydali.text import numbered

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

_SENTENCES = {
    "quarantine": "{of} sample {id} is broken: {path}: {reason}",
    "storage retry": "{path} did not answer for {waited_seconds} s: {reason}",
    "checkpoint failed": "checkpoint {path} could not be written: {reason}",
    "bad checkpoint": "{path} cannot be used, so the previous checkpoint is tried: {reason}",
    "left": "the workers saved step {step} and left, {notice}",
    "preemption": "a node is taken away: {error}",
    "resize": "the workers left for a group of {workers}",
    "stop": "ended with an error: {error}",
    "interrupt": "{why}",
    "finish": "finished",
}
_NOTICES = {
    "preemption": "since a node will be taken away",
    "stop": "since the run was interrupted",
    "resize": "for a group of another size",
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


def phases(row: Mapping[str, Any]) -> str:
    """Describe how long each phase of a start took, for the end of its line; empty if it is not known."""
    found = row.get("phases")
    known = found.items() if isinstance(found, Mapping) else ()
    took = [f"{name} {seconds(number(value))}" for name, value in known if number(value) is not None]
    return f"; {', '.join(took)}" if took else ""


def event(row: Mapping[str, Any], world_size: float | None) -> str:
    """Describe an event, a row of events.jsonl; `world_size` is the number of workers before it."""
    kind, size = row.get("event"), number(row.get("world_size"))
    if kind in ("start", "resume"):
        on = f" on {row['device']}" if isinstance(row.get("device"), str) else ""
        resized = f", before {count(world_size)}" if world_size is not None and size != world_size else ""
        at = f"at step {count(number(row.get('step')))} of {count(number(row.get('steps')))}"
        return f"{'resumed' if kind == 'resume' else 'started'} {at}: {many(size, 'worker')}{on}{resized}"
    if kind in ("rehearsal", "ceiling"):
        ceiling = number(row.get("ceiling_images_per_second"))
        again = " again" if kind == "ceiling" else ""
        took = f"warm-up steps{again} for {seconds(number(row.get('rehearsal_seconds')))}"
        return took if ceiling is None else f"{took}; the ceiling is {count(ceiling)} images/s"
    if kind == "failure":
        failed = f"{named} failed" if (named := _ranks(row)) else "workers failed to start"
        text = f"{failed}: {shortened(row.get('error'))}"
        if isinstance(left_out := row.get("left_out"), list) and left_out:
            text += f"; node {', '.join(map(str, left_out))} is left out"
        return text + (f"; {seconds(pause)} until the next start" if (pause := number(row.get("pause"))) else "")
    if kind == "hang":
        return f"no {'first step' if row.get('starting') else 'progress'} because of {_ranks(row)}, whose processes end"
    if kind == "settings":
        return f"other settings: {changed_settings(row)}"
    facts = {
        str(name): figure(value) if isinstance(value, float) else shown(value)
        for name, value in row.items()
        if name not in ("time", "event", "seconds") and isinstance(value, str | int | float)
    }
    if kind == "chosen":
        return "chosen for this hardware: " + ", ".join(f"{_option(name)} {value}" for name, value in facts.items())
    if sentence := _SENTENCES.get(str(kind)):
        given = {"why": "interrupted", **facts, "notice": _NOTICES.get(str(row.get("notice")), DASH)}
        return shortened(sentence.format_map(defaultdict(lambda: DASH, given)))
    words = "; ".join(f"{name} {value}".replace("_", " ") for name, value in facts.items())
    return shortened(f"{kind}: {words}" if words else kind)


def _ranks(row: Mapping[str, Any]) -> str:
    """Name the ranks of an event, each with its process if this is known; empty if there are none."""
    ranks = row.get("ranks")
    names = [
        f"{each.get('rank')} (node {each.get('node')}, process {each.get('pid')})" if isinstance(each, dict) else each
        for each in (ranks if isinstance(ranks, list) else ())
    ]
    return numbered("rank", names) if names else ""


def _option(name: object) -> str:
    return f"--{name}".replace("_", "-")


def changed_settings(row: Mapping[str, Any]) -> str:
    """Describe an event of settings: each one that a resume changed, with both values."""
    changed = row.get("changed")
    pairs = changed.items() if isinstance(changed, Mapping) else ()
    values = ((name, pair) for name, pair in pairs if isinstance(pair, Sequence) and len(pair) == 2)
    return ", ".join(f"{_option(name)} {shown(now)} instead of {shown(was)}" for name, (was, now) in values)
