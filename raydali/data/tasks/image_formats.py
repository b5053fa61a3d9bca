"""The supported formats of image files, which Pillow decodes; many of them DALI decodes too (plain_images.py).

A format is recognised by a file's first bytes. Files of other formats are never parsed, whatever their name is.
"""

from typing import NamedTuple

from raydali.data.sources.pointers import why_pointer

HEAD = 12
"""Number of first bytes that identify a file's format."""
_REMEDY = "which is not read: convert it to JPEG or PNG"


class Format(NamedTuple):
    """A format that is read.

    Attributes:
        name: the name in Pillow.
        magics: the possible first bytes of a file.
    """

    name: str
    magics: tuple[bytes, ...]


JPEG = Format("JPEG", (b"\xff\xd8\xff",))
PNG = Format("PNG", (b"\x89PNG\r\n\x1a\n",))
WEBP = Format("WEBP", (b"RIFF",))
BMP = Format("BMP", (b"BM",))
PNM = Format("PPM", tuple(b"P%d" % kind for kind in range(1, 7)))
TIFF = Format("TIFF", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"))
JPEG_2000 = Format("JPEG2000", (b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51"))
FORMATS = JPEG, PNG, WEBP, BMP, PNM, TIFF, JPEG_2000

_OTHERS = {
    b"GIF8": "a GIF",
    b"\xff\x0a": "a JPEG XL",
    b"\0\0\0\x0cJXL ": "a JPEG XL",
    b"<svg": "an SVG",
    b"<?xml": "an SVG or another XML file",
    b"%!PS": "an EPS or PostScript file",
    b"%PDF": "a PDF",
    b"\0\0\1\0": "an icon",
}
_BRANDS = {b"avif": "an AVIF", b"avis": "an AVIF", b"heic": "a HEIC", b"heix": "a HEIC", b"mif1": "a HEIC"}


def format_of(head: bytes) -> Format | None:
    """Return the format of a file by its first HEAD bytes; None if it is not supported."""
    if head.startswith(JPEG.magics):  # most files are
        return JPEG
    return next((each for each in FORMATS if head.startswith(each.magics)), None)


def why_not_read(head: bytes) -> str:
    """Return the reason why a file with these first bytes is not supported."""
    if pointer := why_pointer(head):
        return pointer
    named = [name for magic, name in _OTHERS.items() if head.startswith(magic)]
    if head[4:8] == b"ftyp":
        named += [_BRANDS.get(head[8:12], "a video or an image of the MP4 family")]
    return f"{named[0]}, {_REMEDY}" if named else f"cannot identify image file: it begins with {head[:8]!r}"
