"""A sheet of samples: rows of pictures with their classes, facts and files, as one PNG or one HTML file."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raydali.report.html.page import render
from raydali.text import printable

if TYPE_CHECKING:
    from PIL import ImageFont
    from PIL.Image import Image

SIDE = 160
"""Default of `Sheet.side`."""
_MARGIN, _GAP, _PAD = 32, 14, 16
_TITLE_WIDTH, _LINE = 128, 19
_INK, _GREY, _GOOD, _BAD, _BAND = "#1b1f24", "#656d76", "#1a7f37", "#cf222e", "#f3f5f7"


@dataclass(frozen=True)
class Picture:
    """A sample in a sheet.

    Attributes:
        pixels: (height, width, 3), uint8.
        label: the line below the picture.
        facts: the lines below that.
        file: its path or URI, of which the last part is shown.
    """

    pixels: NDArray[np.uint8]
    label: str
    facts: Sequence[str]
    file: str

    @property
    def name(self) -> str:
        """The last part of the file."""
        return self.file.rpartition("/")[2]


@dataclass(frozen=True)
class Row:
    """A row of pictures, with a title and a caption before them."""

    title: str
    caption: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Sheet:
    """The contents of a sheet.

    Attributes:
        title, facts: lines above the pictures.
        rows: the pictures.
        verdict: the result of a check, in a coloured box; empty: none.
        good: whether the verdict is good.
        side: of the square in which a picture is drawn, pixels.
    """

    title: str
    facts: Sequence[str]
    rows: Sequence[Row]
    verdict: str = ""
    good: bool = True
    side: int = SIDE


def as_png(sheet: Sheet, colours: int | None = None) -> bytes:
    """Draw the sheet as a PNG.

    Args:
        sheet: its contents.
        colours: number of colours, at most 256, for a smaller file. Default: all.
    """
    from PIL import Image, ImageDraw

    sheet = replace(sheet, title=printable(sheet.title), facts=[*map(printable, sheet.facts)])
    side, columns = sheet.side, max(len(row.pictures) for row in sheet.rows)
    drawn = [[_drawn(picture, side) for picture in row.pictures] for row in sheet.rows]
    tallest = max(image.height for images in drawn for image in images)
    lines = 1 + max(len(picture.facts) for row in sheet.rows for picture in row.pictures)
    title, bold, plain, small = (_font(*kind) for kind in ((26, True), (15, True), (15, False), (13, False)))
    header = _MARGIN + 44 + 26 * len(sheet.facts) + (52 if sheet.verdict else 8)
    height = tallest + 30 + _LINE * lines + 2 * _PAD
    pictures = _TITLE_WIDTH + columns * side + (columns - 1) * _GAP + _PAD
    texts = [title.getlength(sheet.title), *map(plain.getlength, sheet.facts), bold.getlength(sheet.verdict) + 24]
    width = 2 * _MARGIN + max(pictures, *map(round, texts))
    image = Image.new("RGB", (width, header + len(sheet.rows) * (height + _GAP) + _MARGIN - _GAP), "white")
    draw = ImageDraw.Draw(image)

    draw.text((_MARGIN, _MARGIN - 4), sheet.title, _INK, title, "la")
    for i, fact in enumerate(sheet.facts):
        draw.text((_MARGIN, _MARGIN + 44 + 26 * i), fact, _GREY, plain, "la")
    if sheet.verdict:
        top, right = header - 48, _MARGIN + 24 + round(bold.getlength(sheet.verdict))
        draw.rounded_rectangle((_MARGIN, top, right, top + 28), 14, _GOOD if sheet.good else _BAD)
        draw.text((_MARGIN + 12, top + 14), sheet.verdict, "white", bold, "lm")

    for i, row in enumerate(sheet.rows):
        top = header + i * (height + _GAP)
        draw.rounded_rectangle((_MARGIN, top, width - _MARGIN, top + height), 8, _BAND)
        draw.text((_MARGIN + _PAD, top + _PAD - 2), row.title, _INK, bold, "la")
        draw.text((_MARGIN + _PAD, top + _PAD + 22), row.caption, _GREY, small, "la")
        for column, picture in enumerate(row.pictures):
            left, below = _MARGIN + _TITLE_WIDTH + column * (side + _GAP), top + _PAD + tallest + 6
            image.paste(drawn[i][column], (left, top + _PAD))
            draw.text((left, below), _fitting(picture.label, bold, side), _INK, bold, "la")
            for line, fact in enumerate(picture.facts):
                draw.text((left, below + 22 + _LINE * line), _fitting(fact, small, side), _INK, small, "la")
            draw.text((left, below + 3 + _LINE * lines), _fitting(picture.name, small, side), _GREY, small, "la")
    return _encoded(image if colours is None else image.quantize(colours))


def as_html(sheet: Sheet) -> bytes:
    """Render the sheet as a page that needs no other file; a picture's tooltip is its whole path."""
    rows = [
        (row, [(picture, base64.b64encode(_encoded(_drawn(picture, sheet.side))).decode()) for picture in row.pictures])
        for row in sheet.rows
    ]
    return render(
        "contact_sheet.html.jinja",
        sheet=sheet,
        rows=rows,
        side=sheet.side,
        ink=_INK,
        grey=_GREY,
        band=_BAND,
        verdict_colour=_GOOD if sheet.good else _BAD,
    )


def _drawn(picture: Picture, side: int) -> "Image":
    """The picture, `side` pixels at its longer side; the pixels of a smaller one stay visible."""
    from PIL import Image, ImageOps

    image = Image.fromarray(picture.pixels)
    larger = max(image.size) > side
    return ImageOps.contain(image, (side, side), Image.Resampling.LANCZOS if larger else Image.Resampling.NEAREST)


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


def _fitting(text: str, font: "ImageFont.FreeTypeFont", width: int) -> str:
    """The text; if it is wider than `width` pixels, without its middle, since names differ at their ends."""
    text = printable(text)
    for kept in range(len(text), 0, -1):
        shown = text if kept == len(text) else f"{text[: kept - kept // 2]}\u2026{text[len(text) - kept // 2 :]}"
        if font.getlength(shown) <= width:
            return shown
    return ""
