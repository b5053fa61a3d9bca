"""Downscaling of image files to fewer pixels in the same format.

    JPEG decoded at 1/2, 1/4 or 1/8 --> resized, antialiased --> upright --> encoded
         if that is at least twice the size

The result has only what loaders use: 8-bit pixels, grey or RGB, without alpha, colour profile and EXIF.
"""

import io
from typing import Any

from PIL import ExifTags, Image, ImageOps

from raydali.data.tasks.pillow import decoded, in_8_bits, opened
from raydali.data.tasks.plain_images import HEAD, PNG, format_of, plain_shape

_GREY = "1", "L", "LA", "La"
_DECODED_SIDE = 2
"""Minimum shorter side of a JPEG decoded at a fraction of its size, in multiples of the result's shorter side."""


def downscale(data: bytes, shorter_side: int, quality: int) -> bytes | None:
    """Resize an image file to a shorter side of `shorter_side` pixels; None if it is not larger than that.

    Args:
        data: content of a file in any format that Pillow reads; only the first picture of several is used.
        shorter_side: at least 1; the other side is rounded.
        quality: quality of JPEG and lossy WebP, 1..100.

    Returns:
        The content of a file: JPEG, PNG, WebP, BMP, PNM and TIFF keep their format, others become PNG.

    Raises:
        Exception: in exactly the cases in which `decoded` raises one.
    """
    if plain_shape(memoryview(data)) is None:  # then this may not be done in this process
        whole = decoded(data)
        format = (format_of(data[:HEAD]) or PNG).name
        if min(whole.size) <= shorter_side:
            return None
        grey = whole.convert("L")
        small = _shrunk(grey if grey.convert("RGB") == whole else whole, shorter_side, (0, 0, *whole.size))
        return _encoded(small, format, data, quality)
    image = opened(data)
    if min(image.size) <= shorter_side:
        decoded(data)
        return None
    drafted = image.draft(None, (_DECODED_SIDE * shorter_side,) * 2)
    image.load()
    box = drafted[1] if drafted else (0, 0, *image.size)  # at a fraction, the last row and column may be partial
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    small = in_8_bits(image)
    small = small.convert("L" if small.mode in _GREY else "RGB")
    small = _shrunk(small, shorter_side, box)
    small.info = {}
    small.getexif()[ExifTags.Base.Orientation] = orientation
    return _encoded(ImageOps.exif_transpose(small), image.format, data, quality)


def _shrunk(image: Image.Image, shorter_side: int, box: tuple[int, int, float, float]) -> Image.Image:
    """Return a part of an image, resized to a shorter side."""
    width, height = (max(1, round(shorter_side * side / min(box[2:]))) for side in box[2:])
    return image.resize((width, height), Image.Resampling.LANCZOS, box)


def _encoded(image: Image.Image, format: str | None, before: bytes, quality: int) -> bytes:
    options: dict[str, Any]
    match format:
        case "JPEG" | "MPO":
            format, options = "JPEG", {"quality": quality}
        case "WEBP":
            options = {"quality": quality, "lossless": b"VP8L" in before}
        case "TIFF":
            options = {"compression": "tiff_lzw"}
        case "PNG" | "BMP" | "PPM":
            options = {}
        case _:
            format, options = "PNG", {}
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()
