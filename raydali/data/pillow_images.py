"""An image file's pixels by Pillow: what counts as readable everywhere, whatever decodes it in the end."""

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from raydali.errors import DataError

_JPEG, _SCAN, _END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers: start of image, start of scan, end of image


def decoded(data: bytes) -> Image.Image:
    """The image in a file's content, upright, in 8-bit RGB.

    Raises:
        DataError, Exception: as `opened` does; or Pillow cannot decode it.
    """
    return in_8_bits(ImageOps.exif_transpose(opened(data))).convert("RGB")


def opened(data: bytes) -> ImageFile:
    """The image in a file's content, of which the header alone was looked at.

    Raises:
        DataError: it is empty, or no image; or a JPEG's end is missing: Pillow takes one that was filled up otherwise.
        Exception: it has more than twice PIL.Image.MAX_IMAGE_PIXELS, or a header that Pillow cannot read.
    """
    if not data:
        raise DataError("cannot identify image file: it is empty")
    if data[:2] == _JPEG and not data.endswith(_END) and data.rfind(_END) < data.rfind(_SCAN):
        raise DataError("image file is truncated: a JPEG without its end")
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"cannot identify image file: it begins with {data[:8]!r}") from error


def in_8_bits(image: Image.Image) -> Image.Image:
    """The same, or in mode L if it is of 16 bits: convert("RGB") would cut these off at 255; DALI scales them."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
