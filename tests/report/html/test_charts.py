"""Charts of report.html by themselves: axes that hold what is drawn, and cells that stand for many."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from raydali.report.html.charts import Line, lines, stack
from raydali.report.html.heatmap import heat_map


def test_a_heat_map_keeps_what_stands_out() -> None:
    rows = [[0.1] * 600 for _ in range(1000)]
    rows[777][123] = 0.9
    (drawn,) = heat_map("Waiting", range(1000), rows, share=True)
    assert drawn.note.startswith("from 10.0% to 90.0%, the highest at ranks 123 to 125, epochs 776 to 779; a cell is")
    image = Image.open(io.BytesIO(base64.b64decode(drawn.png)))
    pixels = np.asarray(image)
    assert image.size == (250, 200) and pixels[41, 194] == 255 and (pixels == 1).sum() == pixels.size - 1
    assert image.convert("RGB").getpixel((194, 41)) == (253, 231, 37)
    assert image.convert("RGBA").getpixel((0, 0)) == (68, 1, 84, 255)
    assert heat_map("Waiting", [0], [[float("nan")]], share=True) == heat_map("Waiting", [], [], share=True) == []


def test_cells_that_were_not_measured_are_transparent() -> None:
    (drawn,) = heat_map("Waiting", [0, 1], [[0.1, 0.2], [0.3]], share=True)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(drawn.png))).convert("RGBA"))
    assert pixels[..., 3].tolist() == [[255, 255], [255, 0]]
    assert pixels[0, 0].tolist() == [68, 1, 84, 255] and pixels[0, 1].tolist() == [253, 231, 37, 255]


@pytest.mark.parametrize("y", [[0.0], [5.0], [-1.0, 1.0], [1e-99, 2e-99], [1e6, 1e6 + 1e-9], [-1e99, 1e99], [3, 3, 3]])
def test_axes_hold_their_lines(y: list[float]) -> None:
    for from_zero in (True, False):
        (drawn,) = lines("y", [Line("y", list(range(len(y))), y, 0)], from_zero=from_zero)
        heights = [float(height) for height in re.findall(r"[ML][\d.]+ ([-\d.]+)", dict(drawn.paths)["line c0"])]
        assert len(heights) == len(y) and all(-0.1 <= height <= 240.1 for height in heights)
        assert 2 <= len(drawn.y_ticks) <= 9
    assert lines("y", [Line("y", [0], [None], 0)]) == stack("y", [0], [("a", 0, [None])], [None]) == []
