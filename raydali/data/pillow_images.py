"""An image file's pixels by Pillow: what counts as readable everywhere, whatever decodes it in the end."""

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from raydali.errors import DataError

_JPEG, _SCAN, _END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers: start of image, start of scan, end of image


def decoded(data: bytes) -> Image.Image:
    """The image in a file's content, upright, in 8-bit RGB.

    Raises:
        DataError: it is empty, or no image; or a JPEG's end is missing: Pillow takes one that was filled up otherwise.
        Exception: Pillow cannot decode it, or it has more than twice PIL.Image.MAX_IMAGE_PIXELS.
    """
    if not data:
        raise DataError("cannot identify image file: it is empty")
    if data[:2] == _JPEG and not data.endswith(_END) and data.rfind(_END) < data.rfind(_SCAN):
        raise DataError("image file is truncated: a JPEG without its end")
    try:
        opened = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"cannot identify image file: it begins with {data[:8]!r}") from error
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I;16"):
        # convert("RGB") would cut 16-bit values off at 255; DALI scales them.
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")
