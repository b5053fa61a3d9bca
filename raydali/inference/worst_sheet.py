"""worst.png: a sheet of the samples that a model gets most wrong."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from raydali.inference.kinds.kind import Arrays, Worst
from raydali.report.contact_sheet import Picture, Row, Sheet, as_png
from raydali.text import error_line, plural

if TYPE_CHECKING:
    from raydali.inference.session import Session

COLUMNS, SIDE = 8, 120
COLOURS = 256
"""With these, 64 detailed photographs take 555 kB; in all colours 1.8 MB."""
THREADS = 8

_log = logging.getLogger(__name__)


def worst_sheet(used: "Session", arrays: Arrays, worst: Sequence[Worst], facts: Sequence[str]) -> bytes | None:
    """Draw samples as the model sees them, as a PNG; None if there are none that can be decoded here.

    Args:
        used: the model with the samples.
        arrays: its outputs.
        worst: the samples, the worst first.
        facts: lines below the title.
    """

    def picture(of: Worst) -> Picture | Exception:
        try:
            pixels = used.kind.picture(used.inference.pipeline, used.source, of.id, arrays)
        except Exception as error:  # of another decoder than the model's samples had; a sheet is no reason to fail
            return error
        return Picture(pixels, of.truth, [of.predicted, *([] if of.loss is None else [f"loss {of.loss:.3g}"])], of.path)

    with ThreadPoolExecutor(THREADS) as threads:
        drawn = [*threads.map(picture, worst)]
    pictures = [each for each in drawn if isinstance(each, Picture)]
    if failed := [each for each in drawn if isinstance(each, Exception)]:
        _log.warning("%s cannot be drawn: %s", plural(len(failed), "sample"), error_line(failed[0])[:100])
    if not pictures:
        return None
    rows = [
        Row(f"{first + 1} to {min(first + COLUMNS, len(pictures))}", "", pictures[first : first + COLUMNS])
        for first in range(0, len(pictures), COLUMNS)
    ]
    title = f"{used.run.folder.name}: the {plural(len(pictures), 'sample')} that the model gets most wrong"
    return as_png(Sheet(title=title, facts=[*facts, used.kind.legend], rows=rows, side=SIDE), COLOURS)
