"""An image file's pixels by Pillow: what counts as readable everywhere, whatever decodes it in the end."""

import io
import re
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from raydali.data.tasks.image_formats import HEAD, JPEG, PNG, format_of, why_not_read
from raydali.errors import DataError

_SCAN, _END = b"\xff\xda", b"\xff\xd9"
_MARKER = re.compile(b"\xff[\xc0-\xcf\xd9-\xdf\xe0-\xef\xfe]")
"""Of a JPEG: the end of its image, or one that a segment and its length follow."""
MAX_RESIZED = 2**22
"""Pixels. A file of 2 kB with 5,000 x 1 pixels would have 327 million where its shorter side is resized to 256."""
_LAST = 65_536
"""Bytes that are searched for the end first: walking along the markers takes longer."""
_BITS_PER_SAMPLE = 258


def decoded(data: bytes) -> Image.Image:
    """The image in a file's content, upright, in 8-bit RGB.

    Raises:
        DataError, Exception: as `opened` does; or Pillow cannot decode it.
    """
    return in_8_bits(ImageOps.exif_transpose(opened(data))).convert("RGB")


def opened(data: bytes) -> ImageFile:
    """The image in a file's content; only the header has been parsed.

    Raises:
        DataError: it is empty, or of none of `image_formats.FORMATS`; a JPEG's end is missing: Pillow takes one that
            was filled up otherwise; a PNG's checksum is wrong; its pixels are of a kind that DALI does not decode.
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
    """Return whether an image with its shorter side at `shorter` has too many pixels to be made for its centre."""
    return shorter * shorter * max(height, width) > MAX_RESIZED * min(height, width)


def centre(image: Image.Image, shorter: int, side: int) -> Image.Image:
    """Return the centre (side, side) of an image resized to a shorter side of `shorter`, without the rest of it."""
    wide, high = (shorter * length // min(image.size) for length in image.size)
    left, top = round((wide - side) / 2), round((high - side) / 2)
    x, y = image.width / wide, image.height / high
    box = (left * x, top * y, (left + side) * x, (top + side) * y)
    return image.resize((side, side), Image.Resampling.BILINEAR, box)


def is_certain(error: Exception) -> bool:
    """Return whether an error means that no decoder can read an image: no such file, or what `opened` refuses.

    DALI may decode a file inside of which Pillow gave up.
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
        at += length if at + length < len(data) else 0  # else it is no marker, but damage
    return False


def _checked(data: bytes) -> bytes:
    """Return a PNG without ancillary chunks whose checksums are wrong, which libpng, and so DALI, ignores.

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
    """The same image, or in mode L if its pixels are 16-bit integers, or floats from 0 to 1.

    convert("RGB") would cut these off at 255; DALI scales them.
    """
    if image.mode == "F":
        scaled = np.clip(np.asarray(image), 0, 1) * 255
    elif image.mode == "I" or image.mode.startswith("I;16"):  # a PGM of 16 bits is of mode I
        scaled = np.asarray(image) / 257
    else:
        return image
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
