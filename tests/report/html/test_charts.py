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
    drawn = heat_map("PendingResources", range(1000), rows, share=True)
    assert "from 10.0% to 90.0%, the highest at ranks 123 to 125, epochs 776 to 779" in drawn
    png = base64.b64decode(re.findall(r"base64,([^\"]+)\"", drawn)[0])
    image = Image.open(io.BytesIO(png))
    pixels = np.asarray(image)
    assert image.size == (250, 200) and pixels[41, 194] == 255 and (pixels == 1).sum() == pixels.size - 1
    assert image.convert("RGB").getpixel((194, 41)) == (253, 231, 37)
    assert (
        heat_map("PendingResources", [0], [[float("nan")]], share=True)
        == heat_map("PendingResources", [], [], share=True)
        == ""
    )


@pytest.mark.parametrize("y", [[0.0], [5.0], [-1.0, 1.0], [1e-99, 2e-99], [1e6, 1e6 + 1e-9], [-1e99, 1e99], [3, 3, 3]])
def test_axes_hold_their_lines(y: list[float]) -> None:
    for from_zero in (True, False):
        drawn = lines("y", [Line("y", list(range(len(y))), y, 0)], from_zero=from_zero)
        places = [
            float(place) for place in re.findall(r"[ML][\d.]+ ([-\d.]+)", re.findall(r'"line c0" d="(.*?)"', drawn)[0])
        ]
        assert len(places) == len(y) and all(-0.1 <= place <= 240.1 for place in places)
        assert 2 <= len(re.findall("bottom:", drawn)) <= 9
    assert lines("y", [Line("y", [0], [None], 0)]) == stack("y", [0], [("a", 0, [None])], [None]) == ""
