"""Decoding of image files by Pillow. It defines which files are readable, also for other decoders."""

import io
import re
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from raydali.data.tasks.image_formats import HEAD, JPEG, PNG, format_of, why_not_read
from raydali.data.tasks.pipeline import Interpolation
from raydali.errors import DataError

_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(b"\xff[\xc0-\xcf\xd9-\xdf\xe0-\xef\xfe]")
"""A JPEG's marker of the end of the image, or of a segment with a length."""
MAX_RESIZED = 2**22
"""Maximum pixels of a resized image: an image of 5,000 x 1 pixels with a shorter side of 256 would have 327 million."""
_LAST = 65_536
"""Number of last bytes in which the end marker is searched first, since to follow all markers takes longer."""
_BITS_PER_SAMPLE = 258


def decoded(data: bytes) -> Image.Image:
    """Decode the image in a file's content to upright 8-bit RGB.

    Raises:
        DataError, Exception: see `opened`; or Pillow cannot decode it.
    """
    return in_8_bits(ImageOps.exif_transpose(opened(data))).convert("RGB")


def opened(data: bytes) -> ImageFile:
    """Open the image in a file's content; only the header is parsed.

    Raises:
        DataError: the file is empty, or not of `image_formats.FORMATS`; the end of a JPEG is missing, which Pillow does
            not always detect; a PNG's checksum is wrong; DALI does not decode pixels of this kind.
        Exception: it has more than twice PIL.Image.MAX_IMAGE_PIXELS, or a header that Pillow cannot read.
    """
    if not data:
        raise DataError("cannot identify image file: it is empty")
    format = format_of(data[:HEAD])
    if format is None:
        raise DataError(why_not_read(data[:HEAD]))
    if format is JPEG and not has_end(data):
        raise DataError("image file is truncated: a JPEG without its end")
    try:
        image = Image.open(io.BytesIO(_checked(data) if format is PNG else data), formats=[format.name])
    except UnidentifiedImageError as error:
        raise DataError(f"cannot identify image file: it begins with {data[:8]!r}") from error
    unlike = isinstance(image, TiffImageFile) and _BITS_PER_SAMPLE not in image.tag_v2
    if unlike or (format.modes and image.mode not in format.modes):
        raise DataError(f"a {format.name} of Pillow's mode {image.mode}, which DALI does not read: convert it to PNG")
    return image


def is_thin(height: int, width: int, shorter: int) -> bool:
    """Return whether an image resized to this shorter side has too many pixels to be computed as a whole."""
    return shorter * shorter * max(height, width) > MAX_RESIZED * min(height, width)


def centre(image: Image.Image, shorter: int, side: int, mode: Interpolation) -> Image.Image:
    """Return the centre (side, side) of an image resized to this shorter side; the rest is not computed."""
    wide, high = (shorter * length // min(image.size) for length in image.size)
    left, top = round((wide - side) / 2), round((high - side) / 2)
    x, y = image.width / wide, image.height / high
    box = (left * x, top * y, (left + side) * x, (top + side) * y)
    return image.resize((side, side), Image.Resampling[mode.upper()], box)


def is_certain(error: Exception) -> bool:
    """Return whether an error means that no decoder can read an image: the file is missing, or `opened` refuses it.

    After other errors of Pillow, DALI may still decode the file.
    """
    if isinstance(error, OSError):
        return error.errno is not None or isinstance(error, FileNotFoundError | PermissionError)
    return isinstance(error, DataError | Image.DecompressionBombError)


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


def in_8_bits(image: Image.Image) -> Image.Image:
    """Convert an image of 16-bit integers, or of floats in 0..1, to mode L; return others as they are.

    convert("RGB") would clip such pixels at 255; DALI scales them.
    """
    if image.mode == "F":
        scaled = np.clip(np.asarray(image), 0, 1) * 255
    elif image.mode == "I" or image.mode.startswith("I;16"):  # a PGM of 16 bits is of mode I
        scaled = np.asarray(image) / 257
    else:
        return image
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
