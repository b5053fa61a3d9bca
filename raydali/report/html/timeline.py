"""The events of a run in report.html: a sentence for each, a timeline with their marks, and a table of them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

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
    "checkpoint": "the first checkpoint is complete, of step {step}",
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
class Shown:
    """An event in the table and in the timeline.

    Attributes:
        after: seconds since the start, as a text.
        left: position in the timeline in percent; None if its time is not known.
        style: of its dot.
        text: what happened.
        at: when.
    """

    after: str
    left: float | None
    style: str
    text: str
    at: str


@dataclass(frozen=True)
class Timeline:
    """The newest events, oldest first, on a line of time.

    Attributes:
        spans: style, position and width, in percent, of each time in which workers started or trained.
        begin, length: of the line, as texts; begin is a dash if no event has a time.
        marks: for charts over epochs: the boundary of epochs where a resume happened, and its text.
    """

    events: list[Shown]
    spans: list[tuple[str, float, float]]
    begin: str
    length: str
    marks: list[tuple[float, str]]

    @property
    def styles(self) -> set[str]:
        """The styles of what is shown, as a legend has them."""
        return {f"span {style}" for style, *_ in self.spans} | {f"dot {event.style}" for event in self.events}


def timeline(history: History, now: float | None) -> Timeline:
    """Return the events; `now`: seconds since 1970 while the run goes on, else None."""
    times = [time for row in history.events if (time := number(row.get("time"))) is not None]
    # The run began before its first event, which comes after the first step.
    begun = min([*times, *(time - took for time, _, took in history.starts() if took)], default=math.nan)
    ended = max([*times, now or -math.inf], default=math.nan)

    def share(seconds: float) -> float:
        return 100 * seconds / ((ended - begun) or 1.0)

    events, marks, changed, size = list[Shown](), list[tuple[float, str]](), list[str](), None
    for row in history.events:
        kind, time, text = row.get("event"), number(row.get("time")), event(row, size)
        after, left = (DASH, None) if time is None else (seconds(time - begun), share(time - begun))
        events.append(Shown(after, left, _STYLE.get(str(kind), "calm"), text + phases(row), moment(time)))
        if kind == "settings":
            changed.append(changed_settings(row))
        elif kind in ("start", "resume"):
            step, size = number(row.get("step")), number(row.get("world_size"))
            epochs = (epoch.number for epoch in history.epochs if step is not None and (epoch.get("step") or 0) > step)
            if kind == "resume" and (first := next(epochs, None)) is not None:
                marks.append((first - 0.5, "; ".join([text, *changed])))
            changed.clear()
    spans = [(style, share(first - begun), share(last - first)) for style, first, last in _spans(history, ended)]
    return Timeline(
        events=events[-MAX_EVENTS:],
        spans=spans,
        begin=moment(begun) if times else DASH,
        length=seconds(ended - begun),
        marks=marks[-MAX_EVENTS:],
    )


def _spans(history: History, ended: float) -> Iterator[tuple[str, float, float]]:
    """Style, begin and end of each time in which workers started or trained, until the event that ended it."""
    ends = [
        time
        for row in history.events
        if row.get("event") in (*GROUP_END_EVENTS, *END_EVENTS) and (time := number(row.get("time"))) is not None
    ]
    starts = [*history.starts()]
    for (time, _, took), following in zip_longest(starts, starts[1:]):
        if took:
            yield "starting", time - took, time
        until = following[0] - (following[2] or 0.0) if following else ended
        yield "running", time, max(time, min([until, *(end for end in ends if end > time)]))


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
