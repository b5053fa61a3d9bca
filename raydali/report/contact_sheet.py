"""A sheet of samples: a row of pictures for each rank, with class, id and file, as one PNG or one HTML file."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raydali.report.html.render import render

if TYPE_CHECKING:
    from PIL import ImageFont
    from PIL.Image import Image

SIDE = 160
"""Side of a drawn picture, pixels."""
_MARGIN, _GAP, _PAD = 32, 14, 16
_RANK_WIDTH = 128
_INK, _GREY, _GOOD, _BAD, _BAND = "#1b1f24", "#656d76", "#1a7f37", "#cf222e", "#f3f5f7"


@dataclass(frozen=True)
class Picture:
    """A sample as a rank gets it.

    Attributes:
        pixels: (height, width, 3), uint8.
        file: its path or URI, of which the last part is shown.
    """

    pixels: NDArray[np.uint8]
    id: int
    label: str
    file: str

    @property
    def name(self) -> str:
        """The last part of the file."""
        return self.file.rpartition("/")[2]


@dataclass(frozen=True)
class Sheet:
    """The contents of a sheet.

    Attributes:
        title, facts: lines above the pictures.
        verdict: the result of checking the ids of all ranks.
        good: whether no id is missing or repeated.
        ranks: the pictures of each rank.
        sizes: the samples in each rank's batch; the pictures may be only the first of them.
    """

    title: str
    facts: Sequence[str]
    verdict: str
    good: bool
    ranks: Sequence[Sequence[Picture]]
    sizes: Sequence[int]

    def caption(self, rank: int) -> str:
        """The number of a rank's images that are shown."""
        shown, size = len(self.ranks[rank]), self.sizes[rank]
        return f"{size} images" if shown == size else f"first {shown} of {size}"


def as_png(sheet: Sheet) -> bytes:
    """The sheet as a PNG."""
    from PIL import Image, ImageDraw

    columns = max(map(len, sheet.ranks))
    title, bold, plain, small = (_font(*kind) for kind in ((26, True), (15, True), (15, False), (13, False)))
    header = _MARGIN + 44 + 26 * len(sheet.facts) + 52
    row = SIDE + 68 + 2 * _PAD
    pictures = _RANK_WIDTH + columns * SIDE + (columns - 1) * _GAP + _PAD
    texts = [title.getlength(sheet.title), *map(plain.getlength, sheet.facts), bold.getlength(sheet.verdict) + 24]
    width = 2 * _MARGIN + max(pictures, *map(round, texts))
    image = Image.new("RGB", (width, header + len(sheet.ranks) * (row + _GAP) + _MARGIN - _GAP), "white")
    draw = ImageDraw.Draw(image)

    draw.text((_MARGIN, _MARGIN - 4), sheet.title, _INK, title, "la")
    for i, fact in enumerate(sheet.facts):
        draw.text((_MARGIN, _MARGIN + 44 + 26 * i), fact, _GREY, plain, "la")
    top, right = header - 48, _MARGIN + 24 + round(bold.getlength(sheet.verdict))
    draw.rounded_rectangle((_MARGIN, top, right, top + 28), 14, _GOOD if sheet.good else _BAD)
    draw.text((_MARGIN + 12, top + 14), sheet.verdict, "white", bold, "lm")

    for rank, row_of in enumerate(sheet.ranks):
        top = header + rank * (row + _GAP)
        draw.rounded_rectangle((_MARGIN, top, width - _MARGIN, top + row), 8, _BAND)
        draw.text((_MARGIN + _PAD, top + _PAD - 2), f"rank {rank}", _INK, bold, "la")
        draw.text((_MARGIN + _PAD, top + _PAD + 22), sheet.caption(rank), _GREY, small, "la")
        for column, picture in enumerate(row_of):
            left, below = _MARGIN + _RANK_WIDTH + column * (SIDE + _GAP), top + _PAD + SIDE + 6
            image.paste(_drawn(picture), (left, top + _PAD))
            draw.text((left, below), _fitting(picture.label, bold), _INK, bold, "la")
            draw.text((left, below + 22), f"id {picture.id}", _INK, small, "la")
            draw.text((left, below + 41), _fitting(picture.name, small), _GREY, small, "la")
    return _encoded(image)


def as_html(sheet: Sheet) -> bytes:
    """Render the sheet as a page that needs no other file; a picture's tooltip is its whole path."""
    pictures = [
        [(picture, base64.b64encode(_encoded(_drawn(picture))).decode()) for picture in row] for row in sheet.ranks
    ]
    return render(
        "contact_sheet.html.jinja",
        sheet=sheet,
        ranks=[(sheet.caption(rank), row) for rank, row in enumerate(pictures)],
        side=SIDE,
        ink=_INK,
        grey=_GREY,
        band=_BAND,
        verdict_colour=_GOOD if sheet.good else _BAD,
    )


def _drawn(picture: Picture) -> "Image":
    """The picture at SIDE x SIDE; the pixels of a smaller one stay visible."""
    from PIL import Image

    image = Image.fromarray(picture.pixels)
    larger = max(image.size) > SIDE
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS if larger else Image.Resampling.NEAREST)


def _encoded(image: "Image") -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


@cache
def _font(size: int, bold: bool) -> "ImageFont.FreeTypeFont":
    """DejaVu where the system has it, for the letters of most alphabets; else Pillow's own font, which is ASCII."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf", size)
    except OSError:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's wheels have FreeType"
        return font


def _fitting(text: str, font: "ImageFont.FreeTypeFont") -> str:
    """The text; if it is wider than a picture, without its middle, since names differ at their ends."""
    text = text.encode("utf-8", "replace").decode()  # names of files need not be UTF-8
    for kept in range(len(text), 0, -1):
        shown = text if kept == len(text) else f"{text[: kept - kept // 2]}\u2026{text[len(text) - kept // 2 :]}"
        if font.getlength(shown) <= SIDE:
            return shown
    return ""
