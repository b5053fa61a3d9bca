"""What happened to a run, in report.html: a strip of time with a mark an event, and a table that says what it was."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from raydali.report.html.charts import Mark
from raydali.report.html.history import END_EVENTS, GROUP_END_EVENTS, History, number
from raydali.report.html.text import DASH, changed_settings, count, event, moment, seconds

MAX_EVENTS = 200
"""In the table, and as marks: the newest."""
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


def timeline(history: History, now: float | None) -> str:
    """The strip and the table; empty where nothing happened yet.

    Args:
        now: while the run goes on: seconds since 1970.
    """
    if not history.events:
        return ""
    described, size = [], None
    for row in history.events:
        described.append((row, event(row, size)))
        if row.get("event") in ("start", "resume"):
            size = number(row.get("world_size"))
    times = [time for row in history.events if (time := number(row.get("time"))) is not None]
    begun = min([*times, *(time - took for time, _, took in history.starts() if took)], default=None)
    shown = described[-MAX_EVENTS:]
    left_out = len(described) - len(shown)
    note = f"<p>The newest {MAX_EVENTS} of {count(len(described))} events.</p>" if left_out else ""
    rows = "".join(_row(row, text, begun) for row, text in shown)
    strip = _strip(history, shown, begun, max([*times, now or -math.inf])) if begun is not None else ""
    return (
        f'{strip}{note}<div class="wide"><table class="events"><thead><tr><th scope="col">after</th>'
        f'<th scope="col">what</th><th scope="col">at</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _row(row: Mapping[str, Any], text: str, begun: float | None) -> str:
    time = number(row.get("time"))
    after = DASH if time is None or begun is None else seconds(time - begun)
    at = escape(moment(time))
    return (
        f'<tr title="{at}"><td class="number">{escape(after)}</td>'
        f'<td><i class="dot {_style(row)}"></i>{escape(text)}</td><td>{at}</td></tr>'
    )


def _style(row: Mapping[str, Any]) -> str:
    return _STYLE.get(str(row.get("event")), "calm")


def _strip(history: History, shown: list[tuple[Mapping[str, Any], str]], begun: float, ended: float) -> str:
    length = (ended - begun) or 1.0
    spans = "".join(
        f'<i class="span {style}" style="left:{100 * (first - begun) / length:.2f}%;'
        f'width:{100 * (last - first) / length:.2f}%"></i>'
        for style, first, last in _spans(history, ended)
    )
    marks = "".join(
        f'<b class="{_style(row)}" style="left:{100 * (time - begun) / length:.2f}%" '
        f'title="{escape(f"{text}, after {seconds(time - begun)}")}"></b>'
        for row, text in shown
        if (time := number(row.get("time"))) is not None
    )
    return (
        '<ul class="legend"><li><i class="span starting"></i>starting</li><li><i class="span running"></i>training</li>'
        '<li><i class="dot bad"></i>failure, hang</li><li><i class="dot warn"></i>interrupt, preemption</li></ul>'
        f'<div class="strip" role="img" aria-label="events in time, as in the table">{spans}{marks}</div>'
        f'<div class="x ends"><span>{escape(moment(begun))}</span><span>{escape(seconds(ended - begun))} later</span>'
        "</div>"
    )


def _spans(history: History, ended: float) -> list[tuple[str, float, float]]:
    """When workers started and when they trained; both end with what ended them, the last one with what is known."""
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
    """Resumes between the epochs that they fell between, for charts over epochs."""
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
