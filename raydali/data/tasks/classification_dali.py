"""The DALI graphs of classification.py:

    contents --> decode the window --> resize, flip
    windows, placed by draws from (seed, epoch, id) --^

Only the window is decoded. On the CPU the decoded pixels are Pillow's, bit for bit (JPEG also in CMYK and YCCK,
PNG, WebP, BMP; EXIF orientation applied), and resized ones differ from Pillow's by rounding, at most 2 of 255. On a
GPU so do they but for the outermost ring where the window is scaled down: there DALI's filter repeats the border,
Pillow's cuts it off.
"""

from functools import partial
from typing import Any

from nvidia.dali import fn

from raydali.data.tasks import resize_cpu
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.dali_ops import decoder
from raydali.data.tasks.pipeline import Device


def train_graph(
    settings: TrainImages, encoded: Any, start: Any, size: Any, flips: Any, labels: Any, *, device: Device
) -> tuple[Any, Any]:
    """`TrainImages.graph`."""
    options = decoder(device, settings.hw_decoder_load, settings.largest_image)
    images = fn.decoders.image_slice(encoded, start=start, shape=size, axes=[0, 1], **options)
    square = settings.image_size, settings.image_size
    if device == "cpu":
        images = resize_cpu.each(images, partial(resize_cpu.resize, height=square[0], width=square[1]))
        return fn.flip(images, horizontal=flips), labels
    return fn.resize(images, size=square, roi_start=flips[0], roi_end=flips[1], roi_relative=True), labels.gpu()


def validation_graph(settings: ValidationImages, encoded: Any, *inputs: Any, device: Device) -> tuple[Any, Any]:
    """`ValidationImages.graph`."""
    images = fn.decoders.image(encoded, **decoder(device, settings.hw_decoder_load, settings.largest_image))
    if device == "cpu":
        (labels,) = inputs
        shorter, side = settings.shorter_side, settings.image_size
        return resize_cpu.each(images, partial(resize_cpu.resize_and_crop, shorter=shorter, side=side)), labels
    start, end, labels = inputs
    square = settings.image_size, settings.image_size
    return fn.resize(images, size=square, roi_start=start, roi_end=end), labels.gpu()
