"""Tells a file's format by its header, and whether the file is plain: DALI decodes it exactly as Pillow does.

    plain          DALI decodes it: ordinary JPEG, PNG, WebP, BMP, PNM and TIFF of 8 bits
    all others     Pillow decodes them (pillow.py), for DALI too, which gets the pixels as PNM

Only what is known to be alike is plain. What DALI decodes differently, or not at all, or does not survive, are the rare
kinds: two EXIF blocks, damaged EXIF, orientation in XMP, animations, 12 bits, runs in BMP, separate planes in TIFF,
GIF, AVIF, and JPEG 2000, which ends the process if it is damaged. The list of what is plain is short; a list of the
others has no end.

A format is recognised by a file's first bytes. Files of other formats are never parsed, whatever their name is.
"""

import re
import struct
from typing import NamedTuple

from raydali.data.read.storage import why_pointer

HEAD = 12
"""Number of first bytes that identify a file's format."""
_REMEDY = "which is not read: convert it to JPEG or PNG"


class Format(NamedTuple):
    """A format that is read.

    Attributes:
        name: the name in Pillow.
        magics: the possible first bytes of a file.
        begin: where they begin.
    """

    name: str
    magics: tuple[bytes, ...]
    begin: int = 0


_JPEG_MAGIC = b"\xff\xd8\xff"
JPEG = Format("JPEG", (_JPEG_MAGIC,))
PNG = Format("PNG", (b"\x89PNG\r\n\x1a\n",))
WEBP = Format("WEBP", (b"RIFF",))
BMP = Format("BMP", (b"BM",))
PNM = Format("PPM", tuple(b"P%d" % kind for kind in range(1, 7)))
TIFF = Format("TIFF", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"))
JPEG_2000 = Format("JPEG2000", (b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51"))
GIF = Format("GIF", (b"GIF87a", b"GIF89a"))
AVIF = Format("AVIF", (b"ftypavif", b"ftypavis"), begin=4)
FORMATS = JPEG, PNG, WEBP, BMP, PNM, TIFF, JPEG_2000, GIF, AVIF

_OTHERS = {
    b"\xff\x0a": "a JPEG XL",
    b"\0\0\0\x0cJXL ": "a JPEG XL",
    b"<svg": "an SVG",
    b"<?xml": "an SVG or another XML file",
    b"%!PS": "an EPS or PostScript file",
    b"%PDF": "a PDF",
    b"\0\0\1\0": "an icon",
}
_BRANDS = {b"heic": "a HEIC", b"heix": "a HEIC", b"mif1": "a HEIC"}

Shape = tuple[int, int]
"""Height and width of an upright image, in pixels."""

ORIENTATION = 274
_TYPE_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4)
"""The length of a value of each type in a TIFF directory."""
_SHORT, _LONG = 3, 4
_SEGMENT = struct.Struct(">BBH").unpack_from
_HARMLESS = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
"""Markers of a JPEG's segments that no decoder takes for another picture."""
_PNM = re.compile(rb"P[56]\s(\d{1,6})\s(\d{1,6})\s255\s")
_XMP_ORIENTATION = b"tiff:Orientation"
_PILLOW_EXIF = b"XML:com.adobe.xmp", b"Raw profile type "
"""The beginnings of the texts in a PNG in which Pillow looks for an orientation."""


def format_of(head: bytes) -> Format | None:
    """Return the format of a file by its first HEAD bytes; None if it is not supported."""
    return next((candidate for candidate in FORMATS if head.startswith(candidate.magics, candidate.begin)), None)


def why_not_read(head: bytes) -> str:
    """Return the reason why a file with these first bytes is not supported."""
    if pointer := why_pointer(head):
        return pointer
    named = [name for magic, name in _OTHERS.items() if head.startswith(magic)]
    if head[4:8] == b"ftyp":
        named += [_BRANDS.get(head[8:12], "a video or an image of the MP4 family")]
    return f"{named[0]}, {_REMEDY}" if named else f"cannot identify image file: it begins with {head[:8]!r}"


class Entry(NamedTuple):
    """An entry of a TIFF directory: the type of its values, their number, and their bytes."""

    type: int
    number: int
    value: bytes


class Directory(dict[int, Entry]):
    """The first directory of a TIFF file or of an EXIF block: entries by tag.

    Args:
        data: from the TIFF header on.

    Raises:
        ValueError: it is damaged: an entry or a value is outside of the data, of an unknown type, or doubled.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self.order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]), "")
        if not self.order:
            raise ValueError("no TIFF header")
        (at,) = struct.unpack_from(f"{self.order}I", data, 4)
        (count,) = struct.unpack_from(f"{self.order}H", data, at)
        end = at + 2 + 12 * count
        if at < 8 or end + 4 > len(data):
            raise ValueError("a directory outside of the data")
        for tag, type, values, where in struct.iter_unpack(f"{self.order}HHI4s", data[at + 2 : end]):
            length = values * _TYPE_BYTES[type] if 0 < type < len(_TYPE_BYTES) else -1
            if length > 4:
                (begin,) = struct.unpack(f"{self.order}I", where)
                where = bytes(data[begin : begin + min(length, 64)])
                length = -1 if begin + length > len(data) else length
            if length < 0 or tag in self:
                raise ValueError(f"tag {tag} is damaged")
            self[tag] = Entry(type, values, where)

    def numbers(self, tag: int, default: int) -> set[int]:
        """Return the different values of a tag, as far as they are few whole numbers; -1 stands for any other value."""
        if tag not in self:
            return {default}
        entry = self[tag]
        form = {_SHORT: "H", _LONG: "I"}.get(entry.type)
        if form is None or not 0 < entry.number <= 8:
            return {-1}
        return {*struct.unpack_from(f"{self.order}{entry.number}{form}", entry.value)}

    def orientation(self) -> int:
        """Return the orientation as EXIF counts, 1 to 8; 0 if there is none.

        Raises:
            ValueError: it has another value.
        """
        if ORIENTATION not in self:
            return 0
        if self[ORIENTATION][:2] != (_SHORT, 1) or not (values := self.numbers(ORIENTATION, 0)) <= {*range(1, 9)}:
            raise ValueError("no orientation")
        return values.pop()


def plain_shape(data: memoryview) -> Shape | None:
    """Return the upright shape of the image in a file if it is plain; None if Pillow decodes it.

    Args:
        data: the content of the file, bytes. It may be cut off or damaged after its header, which is all that is read.
    """
    head = bytes(data[:HEAD])
    try:
        if head.startswith(_JPEG_MAGIC):  # most files are
            shape = _jpeg(data)
        else:
            format = format_of(head)
            shape = None if format is None else _SHAPES[format](data)
    except (ValueError, LookupError, struct.error):  # the header is cut off, damaged, or of another kind
        return None
    return shape if shape is not None and min(shape) > 0 else None


def _turned(height: int, width: int, orientation: int) -> Shape:
    return (width, height) if orientation >= 5 else (height, width)


def _jpeg(data: memoryview) -> Shape | None:
    """8 bits, Huffman coding, not RGB as it is, at most one EXIF block, which is sound, and no other orientation."""
    at, shape, orientation, in_xmp, is_rgb = 2, None, None, False, None
    while True:
        mark, marker, length = _SEGMENT(data, at)
        if mark != 0xFF or length < 2:
            return None
        if marker == 0xDA:
            break
        if marker in (0xC4, 0xDB):  # tables, which most segments are
            pass
        elif 0xC0 <= marker <= 0xC2:
            if shape is not None or data[at + 4] != 8 or data[at + 9] not in (1, 3, 4):
                return None
            shape = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            is_coloured = data[at + 9] == 3
            if is_rgb is None:
                is_rgb = bytes(data[at + 10 : at + 19 : 3]) != b"\1\2\3"
        elif marker == 0xE1:
            block = data[at + 4 : at + 2 + length]
            if bytes(block[:4]) == b"Exif":
                if orientation is not None or bytes(block[4:6]) != b"\0\0":
                    return None
                orientation = Directory(block[6:]).orientation()
            in_xmp = in_xmp or _XMP_ORIENTATION in bytes(block)
        elif marker == 0xE0 and bytes(data[at + 4 : at + 8]) == b"JFIF":
            is_rgb = False if is_rgb is None else is_rgb  # JFIF is YCbCr
        elif marker == 0xEE and bytes(data[at + 4 : at + 9]) == b"Adobe":
            is_rgb = data[at + 15] == 0
        elif marker not in _HARMLESS:
            return None
        at += 2 + length
    # GPUs take RGB for YCbCr.
    if shape is None or (is_coloured and is_rgb) or (in_xmp and not orientation):
        return None
    return shape if not orientation else _turned(*shape, orientation)


def _png(data: memoryview) -> Shape | None:
    """At least 8 bits, which GPUs need, no animation, and no EXIF but one sound block before the pixels."""
    width, height, depth = struct.unpack_from(">IIB", data, 16)
    if depth < 8:
        return None
    at, orientation, pixels = 8, None, False
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return _turned(height, width, orientation or 0) if pixels else None
        if kind in (b"acTL", b"zTXt"):  # Pillow refuses images with very long texts
            return None
        if kind == b"eXIf":
            if orientation is not None or pixels:
                return None
            orientation = Directory(data[at + 8 : at + 8 + length]).orientation()
        elif kind in (b"tEXt", b"iTXt") and bytes(data[at + 8 : at + 25]).startswith(_PILLOW_EXIF):
            return None
        pixels = pixels or kind == b"IDAT"
        at += 12 + length


def _webp(data: memoryview) -> Shape | None:
    """No animation, no EXIF, no XMP."""
    kind = bytes(data[12:16])
    if kind == b"VP8 " and bytes(data[23:26]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind != b"VP8X" or data[20] & 0b1110:
        return None
    at, end = 30, len(data)
    while at + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind in (b"EXIF", b"XMP ", b"ANIM", b"ANMF"):
            return None
        at += 8 + length + length % 2
    return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1


def _bmp(data: memoryview) -> Shape | None:
    """Version 3 with 24 bits a pixel, neither packed nor upside down."""
    size, width, height, planes, bits, packing = struct.unpack_from("<IiiHHI", data, 14)
    return (height, width) if (size, planes, bits, packing) == (40, 1, 24, 0) else None


def _pnm(data: memoryview) -> Shape | None:
    """Binary grey or colour of 8 bits without comments."""
    match = _PNM.match(bytes(data[:32]))
    return None if match is None else (int(match[2]), int(match[1]))


def _tiff(data: memoryview) -> Shape | None:
    """Grey or RGB of 8 bits, neither planes nor alpha, in the common ways of packing."""
    held = Directory(data)
    (height,), (width,), (colours,) = (held.numbers(tag, 0) for tag in (257, 256, 262))
    samples = {1: 1, 2: 3}.get(colours)
    plain = (
        held.numbers(258, 1) == {8}  # bits
        and held.numbers(259, 1) <= {1, 5, 8, 32773, 32946}  # none, LZW, deflate, PackBits
        and held.numbers(277, 1) == {samples}
        and held.numbers(284, 1) == {1}  # planes
        and held.numbers(338, -1) == {-1}  # alpha
        and held.numbers(339, 1) == {1}  # unsigned
        and held.numbers(266, 1) == {1}  # the order of bits
    )
    return _turned(height, width, held.orientation()) if plain else None


_SHAPES = {
    JPEG: _jpeg,
    PNG: _png,
    WEBP: _webp,
    BMP: _bmp,
    PNM: _pnm,
    TIFF: _tiff,
}
