"""Resizing on the CPU, inside a DALI graph, by torch's kernel for 8-bit images.

Its results are those of Pillow and torchvision (antialiased) to within 1 of 255, rarely 2, and if bicubic in a few of
100,000 pixels more. It takes half the time of DALI's own CPU kernel, which also differs from Pillow at the border.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from nvidia.dali import fn
from nvidia.dali.pipeline import do_not_convert
from torch.nn import functional as F

from raydali.data.tasks.pillow import centre, is_thin
from raydali.data.tasks.pipeline import Interpolation

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

Image = NDArray[np.uint8]


def resize(image: Image, size: Sequence[float] | NDArray[Any], mode: Interpolation = "bilinear") -> Image:
    """Resize an image (H, W, 3) to this height and width, as torchvision's resized_crop does after the crop."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    height, width = map(int, size)
    resized = F.interpolate(pixels, size=(height, width), mode=mode, antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).numpy()


def resize_and_crop(image: Image, shorter: int, side: int, mode: Interpolation) -> Image:
    """Return the centre (side, side, 3) of an image resized to this shorter side: Resize and CenterCrop."""
    if is_thin(image.shape[0], image.shape[1], shorter):
        return np.asarray(centre(PIL.Image.fromarray(image), shorter, side, mode))
    shape = np.array(image.shape[:2])
    height, width = (shorter * shape // shape.min()).tolist()
    top, left = np.rint((np.array([height, width]) - side) / 2).astype(int).tolist()
    return resize(image, (height, width), mode)[top : top + side, left : left + side]


@do_not_convert  # type: ignore[untyped-decorator]
def each(function: Callable[..., Image], images: "DataNode", *others: "DataNode") -> "DataNode":
    """Return a DALI node of function(image, *others) of each sample, on as many threads as torch has."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def whole_batch(*inputs: Sequence[NDArray[Any]]) -> list[Image]:
        samples = [*zip(*inputs, strict=True)]
        done: list[Any] = [None] * len(samples)

        def part(first: int) -> None:
            for i in range(first, len(samples), threads):
                done[i] = np.ascontiguousarray(function(*samples[i]))

        for future in [pool.submit(part, first) for first in range(threads)]:
            future.result()
        return done

    return fn.python_function(images, *others, function=whole_batch, batch_processing=True, output_layouts="HWC")
