"""Heat maps of report.html, rank by epoch: an embedded PNG with a pixel a cell, stretched by the browser."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from raydali.report.html.charts import as_json
from raydali.report.html.text import figure, percent

MAX_ROWS, MAX_COLUMNS = 256, 250
"""Of cells: with more ranks or epochs, neighbours share a cell, which shows the highest of them."""
LEVELS = 255
"""Of colour; level 0 is no colour at all: not measured."""
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis, which is read alike in both modes and by those who see few colours."""


def heat_map(title: str, epochs: Sequence[int], rows: Sequence[Sequence[float]], *, share: bool, unit: str = "") -> str:
    """The map of one figure; empty where no rank has any.

    Args:
        epochs: their numbers.
        rows: of each epoch the values by rank, NaN where not measured; epochs may differ in their ranks.
        share: whether values are shares, shown in percent.
    """
    ranks = max(map(len, rows), default=0)
    cells = np.full((ranks, len(rows)), np.nan, np.float64)
    for column, values in enumerate(rows):
        cells[: len(values), column] = values
    if not np.isfinite(cells).any():
        return ""
    of_row, of_column = -(-ranks // MAX_ROWS), -(-len(rows) // MAX_COLUMNS)
    cells = _highest(_highest(cells, of_row).T, of_column).T
    finite = cells[np.isfinite(cells)]
    low, high = float(finite.min()), float(finite.max())
    scale = (high - low) or 1.0
    levels = np.zeros(cells.shape, np.uint8)
    known = np.isfinite(cells)
    levels[known] = 1 + np.rint((cells[known] - low) / scale * (LEVELS - 1)).astype(np.uint8)

    def say(value: float) -> str:
        return percent(value) if share else f"{figure(value)}{unit}"

    worst_row, worst_column = np.unravel_index(np.nanargmax(cells), cells.shape)
    rank, column = int(worst_row) * of_row, int(worst_column) * of_column
    worst = _range("rank", rank, min(rank + of_row, ranks) - 1)
    at = _range("epoch", epochs[column], epochs[min(column + of_column, len(epochs)) - 1])
    notes = [f"from {say(low)} to {say(high)}, the highest at {worst}, {at}"]
    if of_row > 1 or of_column > 1:
        notes.append(f"a cell is the highest of {of_row} x {of_column} (ranks x epochs)")
    height = min(max(4 * len(cells), 22 * min(len(cells), 8)), 384)
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
    source = base64.b64encode(_png(levels)).decode()
    what = escape(f"{title}, rank by epoch, {'; '.join(notes)}")
    left, right = f"epoch {epochs[0]}", f"epoch {epochs[-1]}"
    return (
        f'<figure class="chart heat"><figcaption>{escape(title)}<small>{escape("; ".join(notes))}</small></figcaption>'
        f'<div class="scale"><span>{escape(say(low))}</span><i></i><span>{escape(say(high))}</span></div>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{what}"><div class="y">'
        f'<span style="top:0">rank 0</span>{_last_rank(ranks)}</div>'
        f'<div class="area" style="height:{height}px"><img alt="{what}" src="data:image/png;base64,{source}">'
        f'<b class="cursor"></b></div><div class="x ends"><span>{left}</span><span>{right}</span></div></div>'
        f"<output></output>{as_json(data)}</figure>\n"
    )


def _last_rank(ranks: int) -> str:
    return f'<span style="top:100%">{ranks - 1}</span>' if ranks > 1 else ""


def _range(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _highest(cells: NDArray[np.float64], several: int) -> NDArray[np.float64]:
    """The highest of so many neighbouring rows; NaN where all are."""
    if several == 1:
        return cells
    blocks = math.ceil(len(cells) / several)
    padded = np.full((blocks * several, cells.shape[1]), np.nan)
    padded[: len(cells)] = cells
    grouped = padded.reshape(blocks, several, -1)
    highest = np.where(np.isfinite(grouped), grouped, -np.inf).max(1)
    return np.where(np.isfinite(highest), highest, np.nan)


def _png(levels: NDArray[np.uint8]) -> bytes:
    """The levels as a PNG with a palette, whose first colour is transparent."""
    height, width = levels.shape
    palette = bytes(3)
    for level in range(LEVELS):
        at = level / (LEVELS - 1) * (len(_STOPS) - 1)
        i = min(int(at), len(_STOPS) - 2)
        palette += bytes(round(a + (b - a) * (at - i)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))
    rows = np.zeros((height, width + 1), np.uint8)  # each begins with the number of a filter: none
    rows[:, 1:] = levels
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = (b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(rows.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
