"""The sheet as PNG and as HTML: what is drawn where, names that do not fit, and restored images."""

import base64
import io
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.report.comparison_grid import draw, psnr
from raydali.report.contact_sheet import SIDE, Picture, Row, Sheet, _fitting, _font, as_html, as_png

COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30))
GOOD, BAD = (0x1A, 0x7F, 0x37), (0xCF, 0x22, 0x2E)


def picture(id: int, size: int = 64, file: str = "/data/cats/1.jpg", label: str = "cat") -> Picture:
    return Picture(np.full((size, size, 3), COLOURS[id % 4], np.uint8), label, [f"id {id}"], file)


SHEET = Sheet(
    title="The title",
    facts=("/data: 4 images", "world size 2"),
    rows=[
        Row("rank 0", "2 images", [picture(0), picture(1, 400)]),
        Row("rank 1", "first 2 of 5", [picture(2), picture(3)]),
    ],
    verdict="4 ids, none twice",
)


def areas(png: bytes) -> dict[tuple[int, ...], tuple[int, int, int, int]]:
    """Where each colour that is there often lies: left, top, right, bottom."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int) @ (1 << 16, 1 << 8, 1)
    colours, counts = np.unique(pixels, return_counts=True)
    found: dict[tuple[int, ...], tuple[int, int, int, int]] = {}
    for colour in colours[counts > 1500].tolist():
        y, x = np.nonzero(pixels == colour)
        rgb = colour >> 16, colour >> 8 & 255, colour & 255
        found[rgb] = int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1
    return found


def test_rows_of_pictures() -> None:
    found = areas(as_png(SHEET))
    boxes = [found[colour] for colour in COLOURS]
    assert SIDE >= 96
    assert all((right - left, bottom - top) == (SIDE, SIDE) for left, top, right, bottom in boxes)
    assert boxes[0][1] == boxes[1][1] < boxes[2][1] == boxes[3][1]
    assert boxes[0][0] == boxes[2][0] < boxes[1][0] == boxes[3][0]
    assert GOOD in found and BAD not in found


def test_a_bad_verdict_is_red() -> None:
    found = areas(as_png(replace(SHEET, good=False)))
    assert BAD in found and GOOD not in found
    assert b"#cf222e" in as_html(replace(SHEET, good=False)) and b"#cf222e" not in as_html(SHEET)


def test_a_long_title_widens_the_sheet() -> None:
    wide = Image.open(io.BytesIO(as_png(replace(SHEET, facts=("x" * 300,)))))
    assert wide.width > 1000 > Image.open(io.BytesIO(as_png(SHEET))).width


def test_odd_names_are_drawn() -> None:
    odd = picture(7, file="\udcff\n.jpg", label="two\nlines \x1b[31m")
    sheet = replace(SHEET, title="run\n\udcff", facts=("best on /data\udcff\n",), rows=[Row("rank 0", "", [odd])])
    assert as_png(sheet) and "\x1b" not in as_html(sheet).decode()


def test_the_page_says_the_same() -> None:
    odd = picture(7, file="s3://bucket/<a>&\udcff.jpg", label='<b class="x">')
    page = as_html(replace(SHEET, rows=[Row("rank 0", "1 image", [odd]), Row("rank 1", "none", [])])).decode()
    assert 'title="s3://bucket/&lt;a&gt;&amp;\\xff.jpg"' in page and r"<small>&lt;a&gt;&amp;\xff.jpg</small>" in page
    assert "<b>&lt;b class=&#34;x&#34;&gt;</b>" in page and "id 7" in page
    assert "rank 0<small>1 image</small>" in page and "4 ids, none twice" in page and "world size 2" in page
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert areas(base64.b64decode(image)) == {COLOURS[3]: (0, 0, SIDE, SIDE)}
    assert "first 2 of 5" in as_html(SHEET).decode()


@pytest.mark.parametrize(
    "text", ["short.jpg", "W" * 300, "n01440764_" + "0" * 40 + "_10026.JPEG", "", os.fsdecode(b"\xff")]
)
def test_names_are_shortened_in_their_middle(text: str) -> None:
    font = _font(13, False)
    shown = _fitting(text, font, SIDE)
    assert font.getlength(shown) <= SIDE
    if len(shown) < len(text):
        begin, end = shown.split("\u2026")
        assert text.startswith(begin) and text.endswith(end) and len(begin) - len(end) in (0, 1)
        assert font.getlength(shown) > SIDE - 20
    else:
        assert shown == text.replace("\udcff", r"\xff")


@pytest.mark.parametrize(
    ("height", "width", "scale"), [(64, 96, 3), (300, 200, 1), pytest.param(1, 5, 192, marks=pytest.mark.slow)]
)
def test_restored_images_are_beside_one_another(height: int, width: int, scale: int) -> None:
    def images(*colours: tuple[int, int, int]) -> torch.Tensor:
        return torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, height, width)

    dark, pink = (1, 2, 3), (254, 1, 254)
    found = areas(draw(images(COLOURS[0], dark), images(COLOURS[1], pink), images(COLOURS[2], COLOURS[3])))
    boxes = [found[colour] for colour in COLOURS]
    assert all((right - left, bottom - top) == (scale * width, scale * height) for left, top, right, bottom in boxes)
    assert boxes[0][2] < boxes[1][0] and boxes[1][2] < boxes[2][0]
    assert boxes[0][1] == boxes[1][1] == boxes[2][1] < boxes[2][3] < boxes[3][1]
    assert boxes[3][0] == boxes[2][0] and found[pink][0] == boxes[1][0]


def test_an_output_has_its_distance_to_the_truth() -> None:
    truth = np.zeros((8, 8, 3), np.uint8)
    assert psnr(truth + 255, truth) == "0.0 dB" and psnr(truth + 1, truth) == "48.1 dB"
    assert psnr(truth, truth) == "the truth itself"
