"""The DALI graphs of classification.py:

    files --> read --> shape --> window (python_function) --> decode the window --> resize --> flip, normalise
    draws, from (seed, epoch, id) --^                                                  ^-- flips

Only the window is decoded. On the CPU the decoded pixels are Pillow's, bit for bit (JPEG also in CMYK and YCCK,
PNG, WebP, BMP; EXIF orientation applied), and resized ones differ from Pillow's by rounding, at most 2 of 255. On a
GPU so do they but for the outermost ring where the window is scaled down: there DALI's filter repeats the border,
Pillow's cuts it off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from nvidia.dali import fn, types

from raydali.data import resize_cpu
from raydali.data.augment import Range, crop_windows
from raydali.data.classification import Images, Rows, TrainImages, ValidationImages
from raydali.data.labeled_files import LabeledFiles
from raydali.data.pipeline import Device


def train_graph(
    settings: TrainImages, source: LabeledFiles, files: Any, draws: Any, flips: Any, labels: Any, *, device: Device
) -> tuple[Any, Any]:
    """`TrainImages.graph`."""
    encoded = _encoded(source, files)
    start, shape = _pairs(partial(_windows, settings.random_aspect), fn.peek_image_shape(encoded), draws)
    images = fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1], **_decoder(settings, device))
    if device == "cpu":
        images = resize_cpu.each(images, partial(resize_cpu.resize_to_square, side=settings.image_size))
    else:
        images = fn.resize(images, size=(settings.image_size, settings.image_size))
    return _leave(settings, images, labels, device, mirror=flips)


def validation_graph(
    settings: ValidationImages, source: LabeledFiles, files: Any, labels: Any, *, device: Device
) -> tuple[Any, Any]:
    """`ValidationImages.graph`."""
    encoded = _encoded(source, files)
    if device == "cpu":
        shorter, side = settings.resize_size, settings.image_size
        images = fn.decoders.image(encoded, device="cpu")
        images = resize_cpu.each(images, partial(resize_cpu.resize_and_crop, shorter=shorter, side=side))
        return _leave(settings, images, labels, device)
    centres = partial(_centres, settings.resize_size, settings.image_size)
    start, end = _pairs(centres, fn.peek_image_shape(encoded))
    images = fn.decoders.image(encoded, **_decoder(settings, device))
    images = fn.resize(images, size=(settings.image_size, settings.image_size), roi_start=start, roi_end=end)
    return _leave(settings, images, labels, device)


def _encoded(source: LabeledFiles, files: Any) -> Any:
    return fn.io.file.read(files) if source.dali_reads else files


def _pairs(function: Callable[..., tuple[Rows, Rows]], *inputs: Any) -> Any:
    """Two rows of numbers a sample, computed by numpy for the whole batch at once."""
    return fn.python_function(*inputs, function=function, num_outputs=2, batch_processing=True)


def _windows(random_aspect: Range, shapes: Rows, draws: Rows) -> tuple[Rows, Rows]:
    starts, sizes = crop_windows(np.stack(shapes)[:, :2], np.stack(draws), random_aspect)
    return list(starts.astype(np.int32)), list(sizes.astype(np.int32))


def _centres(resize_size: int, image_size: int, shapes: Rows) -> tuple[Rows, Rows]:
    """Where the centre crops of the resized images lie in the originals: start and end, in pixels, not rounded."""
    originals = np.stack(shapes)[:, :2]
    resized = resize_size * originals // originals.min(1, keepdims=True)
    tops = np.rint((resized - image_size) / 2)
    scale = originals / resized
    return list((tops * scale).astype(np.float32)), list(((tops + image_size) * scale).astype(np.float32))


def _decoder(settings: Images, device: Device) -> dict[str, Any]:
    if device == "cpu":
        return {"device": "cpu"}
    return {
        "device": "mixed",
        "hw_decoder_load": settings.hw_decoder_load,
        "preallocate_height_hint": settings.largest_image[0],
        "preallocate_width_hint": settings.largest_image[1],
    }


def _leave(settings: Images, images: Any, labels: Any, device: Device, **options: Any) -> tuple[Any, Any]:
    half = device == "gpu" and settings.gpu_dtype == "float16"
    images = fn.crop_mirror_normalize(
        images,
        mean=[255 * m for m in settings.mean],
        std=[255 * s for s in settings.std],
        dtype=types.DALIDataType.FLOAT16 if half else types.DALIDataType.FLOAT,
        output_layout="HWC",
        **options,
    )
    return images, labels.gpu() if device == "gpu" else labels
