"""Charts of report.html: lines and stacked bars over epochs, in the coordinates of an SVG that needs no script.

A chart's numbers follow it as JSON, for the page's script, which shows values at a pointer or the arrow keys.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from raydali.report.html.text import figure, percent
from raydali.text import duration

WIDTH, HEIGHT = 1000, 240
"""The size of a chart in its own coordinates."""
COLOURS = 8
MAX_POINTS, MAX_BARS = 400, 120
"""Limits of a line and of a stack; with more epochs, neighbours share a point or a bar."""

Values = Sequence[float | None]
Ticks = list[tuple[float, str]]


@dataclass(frozen=True)
class Line:
    """A line of a chart; None leaves a gap.

    Attributes:
        x: ascending.
        colour: from 0; from COLOURS on the colours repeat, dashed.
    """

    label: str
    x: Sequence[float]
    y: Values
    colour: int
    dashed: bool = False

    @property
    def style(self) -> str:
        """The classes of the line's colour and dashes in style.css."""
        return f"c{self.colour % COLOURS}{' dashed' if self.dashed or self.colour >= COLOURS else ''}"


@dataclass(frozen=True)
class Mark:
    """A vertical line where something happened."""

    x: float
    label: str


@dataclass(frozen=True)
class Chart:
    """The data that the template `chart` draws.

    Attributes:
        note: a line below the title; may be empty.
        legend: label and style of each line or part.
        paths: style and SVG path of what is drawn, back to front.
        x_ticks, y_ticks: position in percent, and text.
        data: what the page's script needs to show values.
        marks: x in the chart's coordinates, and text.
        clipped: position in percent and value of bars that are higher than the chart.
    """

    title: str
    note: str
    legend: list[tuple[str, str]]
    paths: list[tuple[str, str]]
    x_ticks: Ticks
    y_ticks: Ticks
    data: dict[str, Any]
    marks: Ticks
    clipped: Ticks

    width: ClassVar[int] = WIDTH
    height: ClassVar[int] = HEIGHT

    @property
    def description(self) -> str:
        """Return the description for screen readers."""
        return f"{self.title}: {', '.join(label for label, _ in self.legend)}"


def lines(
    title: str, lines: Sequence[Line], *, share: bool = False, from_zero: bool = True, marks: Sequence[Mark] = ()
) -> list[Chart]:
    """Draw lines over epochs: one chart, or none if no line has a value.

    Args:
        title: of the chart.
        lines: those without a value are left out.
        share: whether values are shares, shown in percent.
        from_zero: whether the axis begins at 0.
        marks: vertical lines.
    """
    lines = [line for line in map(_drawable, lines) if any(value is not None for value in line.y)]
    if not lines:
        return []
    longest = max(len(line.x) for line in lines)
    left, right = (pick(line.x[i] for line in lines) for pick, i in ((min, 0), (max, -1)))
    left, right = (left - 0.5, right + 0.5) if left == right else (left, right)
    lines = [_thinned(line) for line in lines]
    values = [value for line in lines for value in line.y if value is not None]
    low, high, ticks = _axis(min([*values, 0.0] if from_zero else values), max(values))

    def project(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - left) / (right - left), HEIGHT * (1 - (y - low) / (high - low))

    y_ticks, grid = _y_axis(ticks, low, high, percent if share else figure)
    data = {
        "left": left,
        "right": right,
        "share": share,
        "lines": [{"label": line.label, "x": _rounded(line.x), "y": _rounded(line.y)} for line in lines],
    }
    chart = Chart(
        title=title,
        note="" if longest <= MAX_POINTS else "a point is the mean of several epochs",
        legend=[(line.label, line.style) for line in lines],
        paths=[grid, *((f"line {line.style}", _path(line, project)) for line in lines)],
        x_ticks=_x_ticks([(x, f"{x:,.0f}") for x in _epoch_ticks(left, right)], left, right),
        y_ticks=y_ticks,
        data=data,
        marks=[(project(mark.x, 0)[0], mark.label) for mark in marks if left <= mark.x <= right],
        clipped=[],
    )
    return [chart]


def stack(title: str, x: Sequence[float], parts: Sequence[tuple[str, int, Values]], top: Values) -> list[Chart]:
    """Draw a bar of seconds for each epoch: one chart, or none if there is nothing to stack.

    Args:
        title: of the chart.
        x: the epochs.
        parts: label, colour and values, from the bottom up; None counts as 0.
        top: the seconds of starting, above them. They may be far more than the others: the chart clips them.
    """
    if not any(value for _, _, values in parts for value in values) and not any(top):
        return []
    per_bar = -(-len(x) // MAX_BARS)
    groups = [slice(i, i + per_bar) for i in range(0, len(x), per_bar)]
    heights = [[_mean(values[group]) for group in groups] for _, _, values in parts]
    sums = [sum(column) for column in zip(*heights, strict=True)]
    tops = [sum(value or 0.0 for value in top[group]) / per_bar for group in groups]
    whole = [below + above for below, above in zip(sums, tops, strict=True)]
    limit = min(max(whole), 1.4 * max(sums)) if max(sums) > 0 else max(whole)
    low, high, ticks = _axis(0.0, limit)
    y_ticks, grid = _y_axis(ticks, low, high, figure)
    left, right = -0.5, len(groups) - 0.5

    legend = [(label, f"c{colour}") for label, colour, values in parts if any(values)]
    paths, floor = [grid], [0.0] * len(groups)
    for (_, colour, _), column in zip(parts, heights, strict=True):
        paths.append((f"bar c{colour}", _bars(column, floor, high)))
        floor = [below + height for below, height in zip(floor, column, strict=True)]
    if any(tops):
        legend.append(("starting", "c7"))
        paths.append(("bar c7", _bars(tops, floor, high)))
    labels = [*(label for label, _, _ in parts), "starting"]
    data = {
        "left": left,
        "right": right,
        "share": False,
        "names": [_epochs(x[group]) for group in groups],
        "lines": [
            {"label": label, "x": list(range(len(groups))), "y": _rounded(column)}
            for label, column in zip(labels, [*heights, tops], strict=True)
            if any(column)
        ],
    }
    bars = [(bisect(x, tick) - 1, tick) for tick in _epoch_ticks(x[0], x[-1])]
    x_ticks = [(float(i // per_bar), f"{tick:,.0f}") for i, tick in bars if x[i] == tick]
    too_high = [i for i, height in enumerate(whole) if tops[i] and height > high]
    chart = Chart(
        title=title,
        note="" if per_bar == 1 else f"a bar is the mean of {per_bar} epochs",
        legend=legend,
        paths=[(style, path) for style, path in paths if path],
        x_ticks=_x_ticks(x_ticks, left, right),
        y_ticks=y_ticks,
        data=data,
        marks=[],
        clipped=_x_ticks([(float(i), duration(tops[i] * per_bar)) for i in too_high], left, right),
    )
    return [chart]


def _epochs(x: Sequence[float]) -> str:
    return f"epoch {x[0]:.0f}" if len(x) == 1 else f"epochs {x[0]:.0f} to {x[-1]:.0f}"


def _mean(values: Values) -> float:
    return sum(value or 0.0 for value in values) / len(values)


def _bars(heights: Sequence[float], floor: Sequence[float], high: float) -> str:
    path, width = "", WIDTH / len(heights)
    for i, (height, below) in enumerate(zip(heights, floor, strict=True)):
        if height > 0:
            bottom, top = HEIGHT * (1 - below / high), max(0.0, HEIGHT * (1 - (below + height) / high))
            left, wide = (i + 0.06) * width, 0.88 * width
            path += f"M{left:.1f} {bottom:.1f}V{top:.1f}h{wide:.1f}V{bottom:.1f}z"
    return path


def _drawable(line: Line) -> Line:
    """The line without values that no axis can show, such as those of a loss that diverges."""
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
    """Round limits that hold the values, and about five ticks."""
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


def _y_axis(
    ticks: Sequence[float], low: float, high: float, form: Callable[[float], str]
) -> tuple[Ticks, tuple[str, str]]:
    """The ticks of the vertical axis, and style and path of a horizontal line at each."""
    shares = [(tick - low) / (high - low) for tick in ticks]
    grid = "".join(f"M0 {HEIGHT * (1 - share):.1f}H{WIDTH}" for share in shares)
    texts = [form(round(tick, 12)) for tick in ticks]
    return [(100 * share, text) for share, text in zip(shares, texts, strict=True)], ("grid", grid)


def _x_ticks(ticks: Sequence[tuple[float, str]], left: float, right: float) -> Ticks:
    return [(100 * (x - left) / (right - left), text) for x, text in ticks]
