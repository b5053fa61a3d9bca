"""The DALI graph of detection.py:

    contents --> decode the window --> fit into the square --> flip
    windows, placed by draws from (seed, epoch, id) --^         boxes, moved by numpy --> as they are

On the CPU pixels differ from Pillow's by rounding, at most 2 of 255; on a GPU so do they but for the outermost ring
of what is scaled down, as classification_dali.py says.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn

from raydali.data.tasks import resize_cpu
from raydali.data.tasks.dali_ops import decoder
from raydali.data.tasks.detection import FILL, Images, corners, fitted
from raydali.data.tasks.pipeline import Device


def detection_graph(
    settings: Images, encoded: Any, starts: Any, sizes: Any, flips: Any, *inputs: Any, device: Device
) -> tuple[Any, ...]:
    """`Images.graph`."""
    side = settings.image_size
    options = decoder(device, settings.hw_decoder_load, settings.largest_image)
    images = fn.decoders.image_slice(encoded, start=starts, shape=sizes, axes=[0, 1], **options)
    if device == "cpu":
        images = resize_cpu.each(images, partial(_into_square, side=side))
        return fn.flip(images, horizontal=flips), *inputs
    small, square, *others = inputs
    images = fn.resize(images, size=small)
    images = fn.slice(images, square, (side, side), axes=[0, 1], out_of_bounds_policy="pad", fill_values=FILL)
    return fn.flip(images, horizontal=flips), *(other.gpu() for other in others)


def _into_square(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """An image (H, W, 3) in the middle of a square (side, side, 3)."""
    small = fitted(np.array(image.shape[:2]), side)
    (height, width), (top, left) = small.tolist(), corners(small, side).tolist()
    square = np.full((side, side, 3), FILL, np.uint8)
    square[top : top + height, left : left + width] = resize_cpu.resize(image, height, width)
    return square
