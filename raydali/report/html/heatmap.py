"""Heat maps of report.html, rank by epoch: an embedded PNG with one pixel a cell, which the browser enlarges."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.report.html.text import figure, percent

MAX_ROWS, MAX_COLUMNS = 256, 250
"""Limits of cells; with more ranks or epochs, neighbours share a cell, which shows the highest of them."""
LEVELS = 255
"""Colours; level 0 is transparent: not measured."""
_VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours of evenly spaced values; they can be read in light and dark mode, and by the colour-blind."""


@dataclass(frozen=True)
class HeatMap:
    """The data that the template `heat_map` draws.

    Attributes:
        note: where the extremes are, and what a cell is.
        low, high: the extremes, as texts.
        epochs: the first and the last number.
        height: on the page, pixels.
        png: the cells, in Base64.
        data: what the page's script needs to show values.
    """

    title: str
    note: str
    low: str
    high: str
    ranks: int
    epochs: tuple[int, int]
    height: int
    png: str
    data: dict[str, Any]

    @property
    def description(self) -> str:
        """Return the description for screen readers."""
        return f"{self.title}, rank by epoch, {self.note}"


def heat_map(
    title: str, epochs: Sequence[int], rows: Sequence[Sequence[float]], *, share: bool, unit: str = ""
) -> list[HeatMap]:
    """Draw one quantity of all ranks and epochs: one map, or none if no rank has a value.

    Args:
        title: of the map.
        epochs: their numbers.
        rows: for each epoch the values by rank, NaN where not measured; epochs may differ in their ranks.
        share: whether values are shares, shown in percent.
        unit: of values that are no shares.
    """
    ranks = max(map(len, rows), default=0)
    cells = np.full((ranks, len(rows)), np.nan, np.float64)
    for column, values in enumerate(rows):
        cells[: len(values), column] = values
    if not np.isfinite(cells).any():
        return []
    of_row, of_column = -(-ranks // MAX_ROWS), -(-len(rows) // MAX_COLUMNS)
    cells = _highest(_highest(cells, of_row).T, of_column).T
    known = np.isfinite(cells)
    low, high = float(cells[known].min()), float(cells[known].max())
    scale = (high - low) or 1.0
    levels = np.zeros(cells.shape, np.uint8)
    levels[known] = 1 + np.rint((cells[known] - low) / scale * (LEVELS - 1)).astype(np.uint8)
    low_text, high_text = (percent(value) if share else f"{figure(value)}{unit}" for value in (low, high))

    highest_row, highest_column = np.unravel_index(np.nanargmax(cells), cells.shape)
    rank, column = int(highest_row) * of_row, int(highest_column) * of_column
    at_rank = _range("rank", rank, min(rank + of_row, ranks) - 1)
    at_epoch = _range("epoch", epochs[column], epochs[min(column + of_column, len(epochs)) - 1])
    note = f"from {low_text} to {high_text}, the highest at {at_rank}, {at_epoch}"
    if of_row > 1 or of_column > 1:
        note += f"; a cell is the highest of {of_row} x {of_column} (ranks x epochs)"
    data = {
        "rows": len(cells),
        "of_row": of_row,
        "ranks": ranks,
        "epochs": [epochs[i] for i in range(0, len(epochs), of_column)],
        "last": epochs[-1],
        "low": low,
        "step": scale / (LEVELS - 1),
        "share": share,
        "unit": unit,
        "levels": base64.b64encode(levels.tobytes()).decode(),
    }
    drawn = HeatMap(
        title=title,
        note=note,
        low=low_text,
        high=high_text,
        ranks=ranks,
        epochs=(epochs[0], epochs[-1]),
        height=min(max(4 * len(cells), 22 * min(len(cells), 8)), 384),
        png=base64.b64encode(_png(levels)).decode(),
        data=data,
    )
    return [drawn]


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def _highest(cells: NDArray[np.float64], several: int) -> NDArray[np.float64]:
    """The highest of every `several` neighbouring rows; NaN where all of them are."""
    missing = -len(cells) % several
    padded = np.pad(cells, ((0, missing), (0, 0)), constant_values=np.nan)
    grouped = padded.reshape(-1, several, cells.shape[1])
    highest = np.where(np.isfinite(grouped), grouped, -np.inf).max(1)
    return np.where(np.isfinite(highest), highest, np.nan)


def _png(levels: NDArray[np.uint8]) -> bytes:
    """The levels as a PNG with a palette, whose first colour is transparent."""
    from PIL import Image

    at = np.linspace(0, len(_VIRIDIS) - 1, LEVELS)
    colours = [np.interp(at, range(len(_VIRIDIS)), channel) for channel in zip(*_VIRIDIS, strict=True)]
    palette = np.zeros((LEVELS + 1, 3), np.uint8)
    palette[1:] = np.rint(np.stack(colours, 1))
    image, data = Image.fromarray(levels), io.BytesIO()
    image.putpalette(palette.tobytes())
    image.save(data, "PNG", transparency=0)
    return data.getvalue()
