"""Charts of report.html: lines, stacked bars and a strip of time, as SVG that needs no script.

The drawing stretches with its box while texts stand beside it as HTML, so that they can be read on a phone as well.
Below each chart lie its numbers as JSON, by which the page's script answers a pointer or the arrow keys.
"""

import json
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from raydali.report.html.text import figure, percent, seconds

WIDTH, HEIGHT = 1000, 240
"""Of a chart's coordinates."""
COLOURS = 8
MAX_POINTS, MAX_BARS = 400, 120
"""Of a line and of a stack: where there are more epochs, neighbours share one."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A line of a chart; None leaves a gap.

    Attributes:
        x: rising.
        colour: from 0; from COLOURS on they come again, dashed.
    """

    label: str
    x: Sequence[float]
    y: Values
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """An upright line at something that happened."""

    x: float
    label: str


def lines(
    title: str, lines: Sequence[Line], *, share: bool = False, from_zero: bool = True, marks: Sequence[Mark] = ()
) -> str:
    """A chart of lines over epochs; empty where none has a value.

    Args:
        share: whether values are shares, shown in percent.
        from_zero: whether the axis begins at 0.
    """
    lines = [line for line in map(_drawable, lines) if any(value is not None for value in line.y)]
    if not lines:
        return ""
    longest = max(len(line.x) for line in lines)
    left, right = (pick(line.x[i] for line in lines) for pick, i in ((min, 0), (max, -1)))
    left, right = (left - 0.5, right + 0.5) if left == right else (left, right)
    lines = [_thinned(line) for line in lines]
    values = [value for line in lines for value in line.y if value is not None]
    low, high, ticks = _axis(min([*values, 0.0] if from_zero else values), max(values))

    def project(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - left) / (right - left), HEIGHT * (1 - (y - low) / (high - low))

    drawn = "".join(
        f'<path class="line c{line.colour % COLOURS}{" dashed" if _dashed(line) else ""}" d="{_path(line, project)}"/>'
        for line in lines
    )
    drawn += "".join(
        f'<path class="mark" d="M{project(mark.x, 0)[0]:.1f} 0V{HEIGHT}"><title>{escape(mark.label)}</title></path>'
        for mark in marks
        if left <= mark.x <= right
    )
    form: Callable[[float], str] = percent if share else figure
    keys = [(line.label, f"c{line.colour % COLOURS}{' dashed' if _dashed(line) else ''}") for line in lines]
    data = {
        "left": left,
        "right": right,
        "share": share,
        "lines": [{"label": line.label, "x": _rounded(line.x), "y": _rounded(line.y)} for line in lines],
    }
    note = "" if longest <= MAX_POINTS else "a point is the mean of several epochs"
    x_ticks = [(x, f"{x:,.0f}") for x in _epoch_ticks(left, right)]
    return _figure(title, keys, drawn, _y_axis(ticks, low, high, form), _x_axis(x_ticks, left, right), data, note)


def stack(title: str, x: Sequence[float], parts: Sequence[tuple[str, int, Values]], capped: Values) -> str:
    """Bars of seconds, one an epoch; empty where there is nothing to stack.

    Args:
        parts: label, colour and values from the bottom up; None counts as nothing.
        capped: on top of them, drawn no higher than the chart, which may be far from what it is.
    """
    if not any(value for _, _, values in parts for value in values) and not any(capped):
        return ""
    several = -(-len(x) // MAX_BARS)
    groups = [slice(i, i + several) for i in range(0, len(x), several)]
    heights = [[_mean_or_zero(values[group]) for group in groups] for _, _, values in parts]
    tops = [sum(column) for column in zip(*heights, strict=True)]
    caps = [sum(value or 0.0 for value in capped[group]) / several for group in groups]
    whole = [top + cap for top, cap in zip(tops, caps, strict=True)]
    limit = min(max(whole), 1.4 * max(tops)) if max(tops) > 0 else max(whole)
    low, high, ticks = _axis(0.0, limit)
    width = WIDTH / len(groups)
    keys, drawn, floor = [], "", [0.0] * len(groups)
    for (label, colour, values), column in zip(parts, heights, strict=True):
        if any(value is not None for value in values):
            keys.append((label, f"c{colour}"))
        drawn += _bars(colour, column, floor, width, high)
        floor = [a + b for a, b in zip(floor, column, strict=True)]
    labels = ""
    if any(caps):
        keys.append(("starting", "c7"))
        drawn += _bars(7, caps, floor, width, high)
        for i, cap in enumerate(caps):
            if floor[i] + cap > high:
                at = f"left:{100 * (i + 0.5) / len(groups):.2f}%"
                labels += f'<span class="cut" style="{at}">\u2191 {escape(seconds(cap * several))}</span>'
    names = [*(part[0] for part in parts), "starting"]
    data = {
        "left": -0.5,
        "right": len(groups) - 0.5,
        "share": False,
        "names": [_epochs(x[group]) for group in groups],
        "lines": [
            {"label": name, "x": list(range(len(groups))), "y": _rounded(column)}
            for name, column in zip(names, [*heights, caps], strict=True)
            if any(column)
        ],
    }
    note = "" if several == 1 else f"a bar is the mean of {several} epochs"
    places = [(bisect(x, tick) - 1, tick) for tick in _epoch_ticks(x[0], x[-1])]
    ticks_of_x = [(float(i // several), f"{tick:,.0f}") for i, tick in places if x[i] == tick]
    axes = _y_axis(ticks, low, high, figure), _x_axis(ticks_of_x, -0.5, len(groups) - 0.5)
    return _figure(title, keys, drawn, *axes, data, note, labels)


def _epochs(x: Sequence[float]) -> str:
    return f"epoch {x[0]:.0f}" if len(x) == 1 else f"epochs {x[0]:.0f} to {x[-1]:.0f}"


def _mean_or_zero(values: Values) -> float:
    return sum(value or 0.0 for value in values) / len(values)


def _bars(colour: int, heights: Sequence[float], floor: Sequence[float], width: float, high: float) -> str:
    path = ""
    for i, (height, below) in enumerate(zip(heights, floor, strict=True)):
        if height > 0:
            bottom, top = HEIGHT * (1 - below / high), max(0.0, HEIGHT * (1 - (below + height) / high))
            left, wide = (i + 0.06) * width, 0.88 * width
            path += f"M{left:.1f} {bottom:.1f}V{top:.1f}h{wide:.1f}V{bottom:.1f}z"
    return f'<path class="bar c{colour}" d="{path}"/>' if path else ""


def _dashed(line: Line) -> bool:
    return line.dashed or line.colour >= COLOURS


def _drawable(line: Line) -> Line:
    """The line without what no axis can show: a loss on its way to infinity."""
    y = [None if value is None or abs(value) > 1e99 else 0.0 if abs(value) < 1e-99 else value for value in line.y]
    return replace(line, y=y)


def _thinned(line: Line) -> Line:
    size = -(-len(line.x) // MAX_POINTS)
    if size <= 1:
        return line
    x, y = [], []
    for i in range(0, len(line.x), size):
        known = [value for value in line.y[i : i + size] if value is not None]
        x.append(sum(line.x[i : i + size]) / len(line.x[i : i + size]))
        y.append(sum(known) / len(known) if known else None)
    return replace(line, x=x, y=y)


def _path(line: Line, project: Callable[[float, float], tuple[float, float]]) -> str:
    path, pen_down = "", False
    for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if y is None:
            pen_down = False
            continue
        alone = not pen_down and (i + 1 == len(line.y) or line.y[i + 1] is None)
        left, top = project(x, y)
        path += f"{'L' if pen_down else 'M'}{left:.1f} {top:.1f}{'h.01' if alone else ''}"
        pen_down = True
    return path


def _rounded(values: Values) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Round limits around the values, and about five ticks."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = 0.1 * abs(high) or 1.0
        low, high = (low, high + pad) if low == 0 else (low - pad, high + pad)
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, last * step, [i * step for i in range(first, last + 1)]


def _epoch_ticks(left: float, right: float) -> list[float]:
    step = next(
        step * 10**power for power in range(12) for step in (1, 2, 5) if (right - left) / (step * 10**power) <= 8
    )
    return [float(x) for x in range(math.ceil(left / step) * step, math.floor(right) + 1, step)]


def _y_axis(ticks: Sequence[float], low: float, high: float, form: Callable[[float], str]) -> tuple[str, str]:
    texts = lines = ""
    for tick in ticks:
        share = (tick - low) / (high - low)
        texts += f'<span style="bottom:{100 * share:.2f}%">{escape(form(round(tick, 12)))}</span>'
        lines += f"M0 {HEIGHT * (1 - share):.1f}H{WIDTH}"
    return texts, f'<path class="grid" d="{lines}"/>'


def _x_axis(ticks: Sequence[tuple[float, str]], left: float, right: float) -> str:
    return "".join(
        f'<span style="left:{100 * (x - left) / (right - left):.2f}%">{escape(text)}</span>' for x, text in ticks
    )


def _figure(
    title: str,
    keys: Sequence[tuple[str, str]],
    drawn: str,
    y_axis: tuple[str, str],
    x_axis: str,
    data: Any,
    note: str,
    labels: str = "",
) -> str:
    legend = "".join(f'<li><i class="{style}"></i>{escape(label)}</li>' for label, style in keys)
    small = f"<small>{escape(note)}</small>" if note else ""
    what = escape(f"{title}: {', '.join(label for label, _ in keys)}")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{small}</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{what}"><div class="y">{y_axis[0]}</div>'
        f'<div class="area"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{what}">{y_axis[1]}{drawn}</svg>{labels}<b class="cursor"></b></div>'
        f'<div class="x">{x_axis}</div></div><output></output>{as_json(data)}</figure>\n'
    )


def as_json(data: Any) -> str:
    """A script element that holds data; nothing in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
