"""The events of a run in report.html: a sentence for each, a table of them, and the marks of resumes in charts."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydali.report.html.history import History, finite
from raydali.report.html.text import DASH, count, figure, many, moment, seconds, shortened, shown
from raydali.text import numbered

MAX_EVENTS = 200
"""Limit of the table and of the marks, which show the newest."""
_STYLE = {
    "start": "good",
    "resume": "good",
    "finish": "good",
    "early end": "good",
    "failure": "bad",
    "hang": "bad",
    "ranks differ": "bad",
    "stop": "bad",
    "interrupt": "warn",
    "bad loss": "warn",
    "preemption": "warn",
    "resize": "calm",
    "rehearsal": "calm",
}

_SENTENCES = {
    "quarantine": "{of} sample {id} is broken: {path}: {reason}",
    "storage retry": "{path} did not answer for {waited_seconds} s: {reason}",
    "checkpoint": "the first checkpoint is complete, of step {step}",
    "checkpoint failed": "checkpoint {path} could not be written: {reason}",
    "bad checkpoint": "{path} cannot be used, so the previous checkpoint is tried: {reason}",
    "ranks differ": "{text}",
    "bad loss": "step {step} is bad: {why}; left out: {left_out}; {command} shows it",
    "left": "the workers saved step {step} and left, {notice}",
    "preemption": "a node is taken away: {error}",
    "resize": "the workers left for a group of {workers}",
    "stop": "ended with an error: {error}",
    "interrupt": "{why}",
    "finish": "finished",
    "early end": "ended early: {why}",
}
_NOTICES = {
    "preemption": "since a node will be taken away",
    "stop": "since the run was interrupted",
    "resize": "for a group of another size",
}


@dataclass(frozen=True)
class EventRow:
    """An event in the table.

    Attributes:
        after: seconds since the start, as a text.
        style: of its dot.
        text: what happened.
        at: when.
    """

    after: str
    style: str
    text: str
    at: str


@dataclass(frozen=True)
class EventTable:
    """The newest events, oldest first.

    Attributes:
        rows: of the table.
        marks: for charts over epochs: the boundary of epochs where a resume happened, and its text.
    """

    rows: list[EventRow]
    marks: list[tuple[float, str]]


def event_table(history: History) -> EventTable:
    """Return the events of a run, and the marks that charts have for its resumes."""
    times = [time for row in history.events if (time := finite(row.get("time"))) is not None]
    # The run began before its first event, which comes after the first step.
    begun = min([*times, *(time - took for time, _, took in history.starts() if took)], default=math.nan)
    rows, marks, changed, size = list[EventRow](), list[tuple[float, str]](), list[str](), None
    for row in history.events:
        kind, time, text = row.get("event"), finite(row.get("time")), event(row, size)
        after = DASH if time is None else seconds(time - begun)
        rows.append(EventRow(after, _STYLE.get(str(kind), "calm"), text + phases(row), moment(time)))
        if kind == "settings":
            changed.append(changed_settings(row))
        elif kind in ("start", "resume"):
            step, size = finite(row.get("step")), finite(row.get("world_size"))
            epochs = (epoch.number for epoch in history.epochs if step is not None and (epoch.get("step") or 0) > step)
            if kind == "resume" and (first := next(epochs, None)) is not None:
                marks.append((first - 0.5, "; ".join([text, *changed])))
            changed.clear()
    return EventTable(rows[-MAX_EVENTS:], marks[-MAX_EVENTS:])


def phases(row: Mapping[str, Any]) -> str:
    """Describe how long each phase of a start took, for the end of its line; empty if it is not known."""
    times = row.get("phases")
    items = times.items() if isinstance(times, Mapping) else ()
    took = [f"{name} {seconds(finite(value))}" for name, value in items if finite(value) is not None]
    return f"; {', '.join(took)}" if took else ""


def event(row: Mapping[str, Any], world_size: float | None) -> str:
    """Describe an event, a row of events.jsonl; `world_size` is the number of workers before it."""
    kind, size = row.get("event"), finite(row.get("world_size"))
    if kind in ("start", "resume"):
        on = f" on {row['device']}" if isinstance(row.get("device"), str) else ""
        resized = f", before {count(world_size)}" if world_size is not None and size != world_size else ""
        at = f"at step {count(finite(row.get('step')))} of {count(finite(row.get('steps')))}"
        return f"{'resumed' if kind == 'resume' else 'started'} {at}: {many(size, 'worker')}{on}{resized}"
    if kind in ("rehearsal", "ceiling"):
        ceiling = finite(row.get("ceiling_images_per_second"))
        again = " again" if kind == "ceiling" else ""
        took = f"warm-up steps{again} for {seconds(finite(row.get('rehearsal_seconds')))}"
        return took if ceiling is None else f"{took}; the ceiling is {count(ceiling)} images/s"
    if kind == "failure":
        failed = f"{named} failed" if (named := _ranks(row)) else "workers failed to start"
        text = f"{failed}: {shortened(row.get('error'))}"
        if isinstance(left_out := row.get("left_out"), list) and left_out:
            text += f"; node {', '.join(map(str, left_out))} is left out"
        return text + (f"; {seconds(pause)} until the next start" if (pause := finite(row.get("pause"))) else "")
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
        values = {"why": "interrupted", **facts, "notice": _NOTICES.get(str(row.get("notice")), DASH)}
        return shortened(sentence.format_map(defaultdict(lambda: DASH, values)))
    words = "; ".join(f"{name} {value}".replace("_", " ") for name, value in facts.items())
    return shortened(f"{kind}: {words}" if words else kind)


def _ranks(row: Mapping[str, Any]) -> str:
    """Name the ranks of an event, each with its process if this is known; empty if there are none."""
    ranks = row.get("ranks")
    names = [
        f"{rank.get('rank')} (node {rank.get('node')}, process {rank.get('pid')})" if isinstance(rank, dict) else rank
        for rank in (ranks if isinstance(ranks, list) else ())
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
