"""The sheet of restored images: every picture in its place, and small ones large enough to be seen."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.report.comparison_grid import draw


@pytest.mark.parametrize(("height", "width", "scale"), [(64, 96, 3), (300, 200, 1), (1, 5, 192)])
def test_rows_are_input_output_and_truth(height: int, width: int, scale: int) -> None:
    images = torch.randint(256, (3, 2, 3, height, width), dtype=torch.uint8)
    sheet = np.asarray(Image.open(io.BytesIO(draw(*images))))
    assert sheet.shape == (2 * (24 + scale * height + 8), 3 * scale * width + 4 * 8, 3)
    for row in range(2):
        for column in range(3):
            top, left = 24 + row * (24 + scale * height + 8), 8 + column * (scale * width + 8)
            picture = sheet[top : top + scale * height : scale, left : left + scale * width : scale]
            np.testing.assert_array_equal(picture, images[column, row].permute(1, 2, 0))
        assert sheet[top - 24 : top].min() < 100, "a caption"


def test_a_perfect_output_has_no_figure() -> None:
    truth = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert draw(truth + 3, truth, truth) != draw(truth + 3, truth + 1, truth)
