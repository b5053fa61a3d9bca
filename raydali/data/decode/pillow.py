"""Decoding of image files by Pillow. It defines which files are readable, and how, for all decoders.

A plain image (decoder_choice.py) is decoded in this process, unless it is suspected (`apart`). All others are decoded
in a child process, which may die of them: the libraries for rare kinds are those with faults.
"""

import io
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features
from PIL import __version__ as pillow_version
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from raydali.data.decode.decoder_choice import (
    AVIF,
    HEAD,
    JPEG,
    JPEG_2000,
    ORIENTATION,
    PNG,
    TIFF,
    Directory,
    Format,
    Shape,
    format_of,
    plain_shape,
    why_not_read,
)
from raydali.errors import DataError
from raydali.host.child import Children
from raydali.host.cpu_times import usable_cores

_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(b"\xff[\xc0-\xcf\xd9-\xdf\xe0-\xef\xfe]")
"""A JPEG's marker of the end of the image, or of a segment with a length."""
_LAST = 65_536
"""Number of last bytes in which the end marker is searched first, since to follow all markers takes longer."""
_FRAME = re.compile(b"\xff([\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf])..(.)", re.DOTALL)
"""A JPEG's marker of a frame, and its bits."""
_CODESTREAM = b"\xff\x4f\xff\x51"
"""The beginning of the pixels in JPEG 2000; their bits follow 42 bytes later."""
_MOST_CHILDREN = 16
_BITS, _PLANES, _SIGN = 258, 284, 339
"""Tags of TIFF: bits per sample, planar configuration, sample format."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its orientation in EXIF or XMP."""
_LARGEST_FLOAT = 2.0
"""Floats are read as 0 to 1. Filters may make them a little larger; floats of a larger scale would all be white."""

Pixels = NDArray[np.uint8]
_APART: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def apart(when: bool = True) -> Iterator[None]:
    """Decode plain images in child processes, too, in this context and thread: one of them may have ended a process."""
    token = _APART.set(when)
    try:
        yield
    finally:
        _APART.reset(token)


def decoded(data: bytes) -> Image.Image:
    """Decode the image in a file's content to upright 8-bit RGB.

    Raises:
        DataError, Exception: see `opened`; or Pillow cannot decode it.
    """
    if format_of(data[:HEAD]) is None or (plain_shape(memoryview(data)) is not None and not _APART.get()):
        return _decoded_here(data)
    (pixels,) = decoded_apart([data])
    if isinstance(pixels, Exception):
        raise pixels
    return Image.fromarray(pixels)


def decoded_apart(files: Sequence[bytes]) -> list[Pixels | Exception]:
    """Decode the images in the contents of files in child processes, several at the same time.

    Returns:
        For each upright RGB (H, W, 3); or the error, a DataError or a MemoryError.
    """
    return _children(os.getpid()).map(decoded_pixels, files)


def decoded_pixels(data: bytes) -> Pixels:
    """Return the pixels (H, W, 3) of `decoded`; called in the child processes."""
    return np.array(_decoded_here(data))


# For each process, since a forked one must not use its parent's children.
@cache
def _children(_process: int) -> Children:
    return Children(min(usable_cores(), _MOST_CHILDREN), "decoder")


def _decoded_here(data: bytes) -> Image.Image:
    image = opened(data)
    image.load()  # before its EXIF is read, which hides errors of the pixels
    bits = image.tag_v2.get(_BITS, (8,)) if isinstance(image, TiffImageFile) else (8,)
    deep = _deep_jpeg_2000(data) if image.format == JPEG_2000.name and image.mode[:3] == "RGB" else None
    return turned(in_8_bits(image if deep is None else deep, max(bits)).convert("RGB"), image)


def turned(pixels: Image.Image, image: ImageFile) -> Image.Image:
    """Return the pixels of an image file upright, which were stored as they are in it."""
    turn = _TURNS.get(orientation(image))
    return pixels if turn is None else pixels.transpose(turn)


def orientation(image: ImageFile) -> int:
    """Return an image's orientation in EXIF or XMP, 1 to 8; 1 if they have no valid one. `load` applies a TIFF's."""
    try:
        value = image.getexif().get(ORIENTATION)
        return int(value) if value in _TURNS else 1
    except (SyntaxError, ValueError, LookupError, TypeError, struct.error):
        return 1


def upright_shape(data: bytes) -> Shape:
    """Return height and width of the upright image in a file's content, in pixels, without decoding it.

    Args:
        data: it may be cut off after the header if the file is plain, see `plain_shape`.

    Raises:
        DataError, Exception: see `opened`.
    """
    if (shape := plain_shape(memoryview(data))) is not None:
        return shape
    image = opened(data)
    is_turned = orientation(image) >= 5 and not isinstance(image, TiffImageFile)  # a TIFF's size is upright already
    return (image.width, image.height) if is_turned else (image.height, image.width)


def opened(data: bytes) -> ImageFile:
    """Open the image in a file's content; only the header is parsed.

    Raises:
        DataError: the file is empty, or not of `decoder_choice.FORMATS`; the end of a JPEG is missing, which Pillow
            does not always detect; a PNG's checksum is wrong; Pillow does not decode pixels of this kind, or wrongly,
            or was built without AVIF.
        Exception: it has more than twice PIL.Image.MAX_IMAGE_PIXELS, or a header that Pillow cannot read.
    """
    if not data:
        raise DataError("cannot identify image file: it is empty")
    format = format_of(data[:HEAD])
    if format is None:
        raise DataError(why_not_read(data[:HEAD]))
    if format is JPEG and not has_end(data):
        raise DataError("image file is truncated: a JPEG without its end")
    if format is AVIF and not features.check("avif"):
        raise DataError(f"an AVIF, which Pillow {pillow_version} reads only with libavif: install pillow 11.3 or newer")
    try:
        image = Image.open(io.BytesIO(_checked(data) if format is PNG else data), formats=[format.name])
    except UnidentifiedImageError as error:
        raise DataError(f"cannot identify image file: {_kind(data, format)}: convert it to PNG") from error
    if isinstance(image, TiffImageFile):
        deep, signed = max(image.tag_v2.get(_BITS, (1,))) > 8, 2 in image.tag_v2.get(_SIGN, ())
        if deep and image.tag_v2.get(_PLANES) == 2:
            raise DataError("a TIFF of more than 8 bits in separate planes: save it with its channels interleaved")
        if signed or image.mode == "I":
            raise DataError("a TIFF of signed or 32-bit integers, whose white is unknown: convert it to 8 or 16 bits")
    return image


def _kind(data: bytes, format: Format) -> str:
    """Return what kind of file of a known format it is that Pillow does not open."""
    if format is JPEG and (frame := _FRAME.search(data)):
        coding = {0xC3: "lossless ", 0xC9: "arithmetic "}.get(frame[1][0], "")
        return f"a {coding}JPEG of {frame[2][0]} bits, which Pillow does not read"
    if format is TIFF:
        with suppress(ValueError, struct.error):
            held = Directory(memoryview(data))
            bits, samples, packing, signs = (max(held.numbers(tag, 1)) for tag in (_BITS, 277, 259, _SIGN))
            numbers = {2: "signed integers", 3: "floats"}.get(signs, "integers")
            return f"a TIFF of {samples} x {bits}-bit {numbers}, compression {packing}, which Pillow does not read"
    kind = "a damaged header, or of a kind that Pillow does not read"
    return f"a file of format {format.name} with {kind}; it begins with {data[:8]!r}"


def has_end(data: bytes | memoryview) -> bool:
    """Return whether a JPEG is complete; data after the image, such as a phone's video, does not count."""
    tail = bytes(data[-_LAST:])
    if tail.rfind(_END) > tail.rfind(_SCAN):
        return True
    at, scanned = 2, False
    while match := _MARKER.search(data, at):
        at = match.end()
        if match[0] == _END:
            return scanned
        scanned = scanned or match[0] == _SCAN
        length = int.from_bytes(data[at : at + 2])
        at += length if at + length < len(data) else 0  # otherwise the file is damaged
    return False


def _checked(data: bytes) -> bytes:
    """Return a PNG without the ancillary chunks with wrong checksums, which libpng, and therefore DALI, ignores.

    Raises:
        DataError: the checksum of a critical chunk is wrong.
    """
    at, wrong = 8, []
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        end = at + 12 + length
        kind = data[at + 4 : at + 8]
        if end > len(data) or kind == b"IEND":
            break
        if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            if not kind[0] & 0x20:
                raise DataError(f"image file is damaged: a PNG whose {kind.decode('latin-1')} has a wrong checksum")
            wrong.append((at, end))
        at = end
    for begin, end in reversed(wrong):
        data = data[:begin] + data[end:]
    return data


def in_8_bits(image: Image.Image, bits: int = 16) -> Image.Image:
    """Convert an image of integers of more than 8 bits, or of floats in 0..1, to mode L; return others as they are.

    convert("RGB") would clip such pixels at 255.

    Args:
        image: of any mode.
        bits: of an integer; integers of formats that Pillow scales have 16.

    Raises:
        DataError: the floats are of another scale than 0 to 1.
    """
    if image.mode == "F":
        floats = np.asarray(image)
        if (largest := np.nanmax(floats, initial=0)) > _LARGEST_FLOAT:
            raise DataError(f"floats up to {largest:g}, where 0 is black and 1 is white: scale them to 0 to 1")
        scaled = np.clip(np.nan_to_num(floats), 0, 1) * 255
    elif image.mode == "I" or image.mode.startswith("I;16"):  # a PGM of 16 bits is of mode I
        scaled = np.asarray(image) * (255 / (2 ** (bits if bits > 8 else 16) - 1))
    else:
        return image
    return Image.fromarray(np.rint(scaled).astype(np.uint8))


def _deep_jpeg_2000(data: bytes) -> Image.Image | None:
    """Return a colour image of more than 8 bits, decoded by DALI; None for one of at most 8.

    Pillow rounds the white of such images up to 256, which it stores as 0, black.
    """
    at = data.find(_CODESTREAM)
    bits = (data[at + 42] & 0x7F) + 1
    if bits <= 8:
        return None
    from raydali.data.decode.dali_trial import decoded_in_16_bits

    scaled = decoded_in_16_bits(data) * (255 / (2**bits - 1))
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
