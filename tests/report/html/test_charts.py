"""Charts of report.html by themselves: axes that hold what is drawn."""

import re

import pytest

from raydali.report.html.charts import Line, chart


@pytest.mark.parametrize("y", [[0.0], [5.0], [-1.0, 1.0], [1e-99, 2e-99], [1e6, 1e6 + 1e-9], [-1e99, 1e99], [3, 3, 3]])
def test_axes_hold_their_lines(y: list[float]) -> None:
    for from_zero in (True, False):
        (drawn,) = chart("y", [Line("y", list(range(len(y))), y, 0)], from_zero=from_zero)
        heights = [float(height) for height in re.findall(r"[ML][\d.]+ ([-\d.]+)", dict(drawn.paths)["line c0"])]
        assert len(heights) == len(y) and all(-0.1 <= height <= 100.1 for height in heights)
        assert 2 <= len(drawn.y_ticks) <= 9
    for stacked in (True, False):
        assert chart("y", [Line("y", [0], [None], 0)], stacked=stacked) == []
