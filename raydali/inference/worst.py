"""Finds the samples that a model gets most wrong, or least right, and draws a sheet of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.report.contact_sheet import Picture, Row, Sheet, as_png
from raydali.text import error_line, plural

SHOWN = 64
COLUMNS, SIDE = 8, 120
COLOURS = 256
"""With these, 64 detailed photographs take 555 kB; in all colours 1.8 MB."""
THREADS = 8

_log = logging.getLogger(__name__)


def worst_of(
    arrays: Mapping[str, Any],
    badness: NDArray[np.floating | np.integer],
    path: Callable[[int], str],
    words: Callable[[int], tuple[str, str]],
) -> list[dict[str, Any]]:
    """Return the samples with the highest badness, the worst first: id, path, truth, what is predicted, and loss.

    Args:
        arrays: of all samples, with "ids" and, if each sample has one, "losses" (n,).
        badness: of each sample (n,).
        path: returns the path of a sample by its id.
        words: returns what a sample is and what the model says of it, by its place in the arrays.
    """
    samples = []
    for place in np.argsort(-badness, kind="stable")[:SHOWN].tolist():
        id, (truth, predicted) = int(arrays["ids"][place]), words(place)
        loss = float(arrays["losses"][place]) if "losses" in arrays else None
        samples.append({"id": id, "path": path(id), "truth": truth, "predicted": predicted, "loss": loss})
    return samples


def worst_sheet(
    worst: Sequence[Mapping[str, Any]], draw: Callable[[int], NDArray[np.uint8]], run: str, facts: Sequence[str]
) -> bytes | None:
    """Draw samples as the model sees them, as a PNG; None if there are none that can be decoded here.

    Args:
        worst: the samples, see `worst_of`.
        draw: returns the picture of a sample (height, width, 3) by its id.
        run: the name of the run.
        facts: lines below the title.
    """

    def picture(of: Mapping[str, Any]) -> Picture | Exception:
        loss = [] if of["loss"] is None else [f"loss {of['loss']:.3g}"]
        try:
            return Picture(draw(of["id"]), of["truth"], [of["predicted"], *loss], of["path"])
        except Exception as error:  # of another decoder than the model's samples had; a sheet is no reason to fail
            return error

    with ThreadPoolExecutor(THREADS) as threads:
        drawn = [*threads.map(picture, worst)]
    pictures = [drawing for drawing in drawn if isinstance(drawing, Picture)]
    if failed := [error for error in drawn if isinstance(error, Exception)]:
        _log.warning("%s cannot be drawn: %s", plural(len(failed), "sample"), error_line(failed[0])[:100])
    if not pictures:
        return None
    rows = [
        Row(f"{first + 1} to {min(first + COLUMNS, len(pictures))}", "", pictures[first : first + COLUMNS])
        for first in range(0, len(pictures), COLUMNS)
    ]
    title = f"{run}: the {plural(len(pictures), 'sample')} that the model gets most wrong"
    return as_png(Sheet(title=title, facts=facts, rows=rows, side=SIDE), COLOURS)
