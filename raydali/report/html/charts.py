"""Charts of report.html: lines or stacked bars over epochs, as an SVG that needs no script.

Positions are in percent of the chart's width and height, from the top left. A chart's numbers follow it as JSON, for
the page's script, which shows values at a pointer or the arrow keys.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from raydali.report.html.text import figure, percent

COLOURS = 8

Values = Sequence[float | None]
Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Line:
    """A line of a chart, or a part of its bars; None leaves a gap.

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
class Chart:
    """The data that the template `chart` draws.

    Attributes:
        note: a line below the title; may be empty.
        legend: label and style of each line.
        paths: style and SVG path of what is drawn, back to front.
        x_ticks, y_ticks, marks: position and text; a mark is a vertical line.
        data: what the page's script needs to show values.
    """

    title: str
    note: str
    legend: list[tuple[str, str]]
    paths: list[tuple[str, str]]
    x_ticks: Ticks
    y_ticks: Ticks
    marks: Ticks
    data: dict[str, Any]


@dataclass(frozen=True)
class _Scale:
    """The values at the edges of a chart."""

    left: float
    right: float
    low: float
    high: float

    def across(self, x: float) -> float:
        return 100 * (x - self.left) / (self.right - self.left)

    def down(self, y: float) -> float:
        return max(0.0, 100 * (self.high - y) / (self.high - self.low))

    def curve(self, line: Line) -> str:
        path, command = "", "M"
        for x, y in zip(line.x, line.y, strict=True):
            if y is None:
                command = "M"
            else:  # after a gap, a dot: the next value may be missing
                path += f"{command}{self.across(x):.2f} {self.down(y):.2f}{'h.01' if command == 'M' else ''}"
                command = "L"
        return path

    def bars(self, line: Line, floor: Sequence[float], top: Sequence[float]) -> str:
        path = ""
        for x, below, above in zip(line.x, floor, top, strict=True):
            if above > below:
                left, right, bottom = self.across(x - 0.44), self.across(x + 0.44), self.down(below)
                path += f"M{left:.2f} {bottom:.2f}V{self.down(above):.2f}H{right:.2f}V{bottom:.2f}z"
        return path


def chart(
    title: str,
    lines: Iterable[Line],
    *,
    stacked: bool = False,
    share: bool = False,
    from_zero: bool = True,
    highest: float = math.inf,
    marks: Ticks = (),
) -> list[Chart]:
    """Draw lines over epochs: one chart, or none if there is nothing to draw.

    Args:
        title: of the chart.
        lines: lines without a value are left out.
        stacked: draw a bar for each epoch, of the lines' values from the bottom up. All lines have the same epochs.
        share: whether values are shares, shown in percent.
        from_zero: whether the axis begins at 0.
        highest: limit of the axis; higher bars are cut.
        marks: epoch and text of vertical lines.
    """
    lines = [line for line in map(_drawable, lines) if any(line.y if stacked else (y is not None for y in line.y))]
    if not lines:
        return []
    left, right = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    if stacked or left == right:
        left, right = left - 0.5, right + 0.5
    tops = [*accumulate(([y or 0.0 for y in line.y] for line in lines), _sums)] if stacked else []
    values = tops[-1] if stacked else [y for line in lines for y in line.y if y is not None]
    ticks = _ticks(min([*values, 0.0] if from_zero else values), min(max(values), highest), 4)
    scale = _Scale(left, right, ticks[0], ticks[-1])
    if stacked:
        pairs = pairwise([[0.0] * len(values), *tops])
        drawn = [(f"bar {line.style}", scale.bars(line, *pair)) for line, pair in zip(lines, pairs, strict=True)]
    else:
        drawn = [(f"line {line.style}", scale.curve(line)) for line in lines]
    grid = "".join(f"M0 {scale.down(y):.2f}H100" for y in ticks)
    whole = [x for x in _ticks(left, right, 8) if x.is_integer() and left <= x <= right]
    numbers = [{"label": line.label, "x": _rounded(line.x), "y": _rounded(line.y)} for line in lines]
    chart = Chart(
        title=title,
        note="higher bars are cut" if max(values) > scale.high else "",
        legend=[(line.label, line.style) for line in lines],
        paths=[("grid", grid), *drawn],
        x_ticks=[(scale.across(x), f"{x:,.0f}") for x in whole],
        y_ticks=[(scale.down(y), percent(y) if share else figure(y)) for y in ticks],
        marks=[(scale.across(x), text) for x, text in marks if left <= x <= right],
        data={"left": left, "right": right, "share": share, "lines": numbers},
    )
    return [chart]


def _sums(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _drawable(line: Line) -> Line:
    """The line without values that no axis can show, such as the values of a loss that diverges."""
    y = [None if value is None or abs(value) > 1e99 else 0.0 if abs(value) < 1e-99 else value for value in line.y]
    return replace(line, y=y)


def _rounded(values: Values) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]


def _ticks(low: float, high: float, parts: int) -> list[float]:
    """Round numbers at equal distances, the first and the last around these limits; at most `parts` between them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = 0.1 * abs(high) or 1.0
        low, high = (low, high + pad) if low == 0 else (low - pad, high + pad)
    rough = (high - low) / parts
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
