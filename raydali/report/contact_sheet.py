"""A sheet of samples: a row of pictures a rank, each with its class, id and file, as one PNG or as one HTML file."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import ImageFont
    from PIL.Image import Image

SIDE = 160
"""Of a picture as it is drawn, pixels."""
_MARGIN, _GAP, _PAD = 32, 14, 16
_RANK_WIDTH = 128
_INK, _GREY, _GOOD, _BAD, _BAND = "#1b1f24", "#656d76", "#1a7f37", "#cf222e", "#f3f5f7"


@dataclass(frozen=True)
class Picture:
    """A sample as a rank gets it.

    Attributes:
        pixels: (height, width, 3), uint8.
        file: where it comes from: a path or a URI, whose last part is shown.
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
    """What is drawn.

    Attributes:
        title, facts: lines above the pictures.
        verdict: what was found about the ids of all ranks.
        good: whether that is as it should be.
        ranks: the pictures of each rank.
        sizes: how many samples its batch has, of which the pictures may be the first few.
    """

    title: str
    facts: Sequence[str]
    verdict: str
    good: bool
    ranks: Sequence[Sequence[Picture]]
    sizes: Sequence[int]

    def below_rank(self, rank: int) -> str:
        """What stands below the number of a rank."""
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
        draw.text((_MARGIN + _PAD, top + _PAD + 22), sheet.below_rank(rank), _GREY, small, "la")
        for column, picture in enumerate(row_of):
            left, below = _MARGIN + _RANK_WIDTH + column * (SIDE + _GAP), top + _PAD + SIDE + 6
            image.paste(_drawn(picture), (left, top + _PAD))
            draw.text((left, below), _fitting(picture.label, bold), _INK, bold, "la")
            draw.text((left, below + 22), f"id {picture.id}", _INK, small, "la")
            draw.text((left, below + 41), _fitting(picture.name, small), _GREY, small, "la")
    return _encoded(image)


def as_html(sheet: Sheet) -> bytes:
    """The sheet as a page that needs no other file; a picture's tooltip is its whole path."""
    rows = "".join(
        f'<section><h2>rank {rank}<small>{sheet.below_rank(rank)}</small></h2><div class="pictures">'
        + "".join(map(_figure, pictures))
        + "</div></section>\n"
        for rank, pictures in enumerate(sheet.ranks)
    )
    facts = "".join(f"<p>{escape(fact)}</p>" for fact in sheet.facts)
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(sheet.title)}</title><style>
body {{ margin: 32px; font: 15px/1.4 "DejaVu Sans", system-ui, sans-serif; color: {_INK}; background: white }}
h1 {{ font-size: 26px; margin: 0 0 8px }} p {{ margin: 2px 0; color: {_GREY} }}
strong {{ display: inline-block; margin: 12px 0; padding: 4px 12px; border-radius: 14px; color: white;
  background: {_GOOD if sheet.good else _BAD} }}
section {{ display: flex; margin: 0 0 14px; padding: 16px; border-radius: 8px; background: {_BAND} }}
h2 {{ flex: 0 0 112px; font-size: 15px; margin: 0 }}
small {{ display: block; font-size: 13px; font-weight: normal; color: {_GREY} }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 14px }} figure {{ width: {SIDE}px; margin: 0 }}
img {{ display: block; margin: 0 0 6px }} figcaption * {{ overflow-wrap: anywhere }}
</style></head><body>
<h1>{escape(sheet.title)}</h1>{facts}<strong>{escape(sheet.verdict)}</strong>
{rows}</body></html>
"""
    return page.encode("utf-8", "replace")  # names of files need not be UTF-8


def _figure(picture: Picture) -> str:
    data = base64.b64encode(_encoded(_drawn(picture))).decode()
    return (
        f'<figure title="{escape(picture.file)}"><img width="{SIDE}" height="{SIDE}" alt="{escape(picture.label)}" '
        f'src="data:image/png;base64,{data}"><figcaption><b>{escape(picture.label)}</b>'
        f"<small>id {picture.id}</small><small>{escape(picture.name)}</small></figcaption></figure>"
    )


def _drawn(picture: Picture) -> "Image":
    """The picture at SIDE x SIDE; one that is smaller keeps its pixels visible."""
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
    """The text, with its middle left out where it is wider than a picture: beginnings and endings tell most."""
    text = text.encode("utf-8", "replace").decode()  # names of files need not be UTF-8
    for kept in range(len(text), 0, -1):
        shown = text if kept == len(text) else f"{text[: kept - kept // 2]}\u2026{text[len(text) - kept // 2 :]}"
        if font.getlength(shown) <= SIDE:
            return shown
    return ""
