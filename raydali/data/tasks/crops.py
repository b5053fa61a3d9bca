"""Crops and flips of images: where they are, and how they are resized, by each way of decoding.

    uniforms (N, 22)  --draw_crops-->  draws (N, 11, 2)  --crop_windows-->  starts, sizes (N, 2)
    from data/stream/counter_rng.py                    no shape needed       + image shapes

`draw_crops` runs on the host before files are read, and `crop_windows` when the shapes of images are known.

    resize, resize_and_crop    one image, on the CPU, by torch's kernel for 8 bits, inside a DALI graph (dali_ops.py)
    pillow_centre              one image, by Pillow

Their results equal Pillow's and torchvision's (antialiased) to within 1 of 255, rarely 2, and if bicubic in a few of
100,000 pixels more. torch's kernel takes half the time of DALI's own on the CPU, which also differs from Pillow at the
border. The driver imports this file: torch is imported where it is used.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.tasks.pipeline import Interpolation
from raydali.data.tasks.settings import Settings, require, require_share

if TYPE_CHECKING:
    from PIL import Image

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Range = tuple[float, float]

ATTEMPTS = 10
CROP_UNIFORMS = 2 * ATTEMPTS + 2
MAX_RESIZED = 2**22
"""Maximum pixels of a resized image: an image of 5,000 x 1 pixels with a shorter side of 256 would have 327 million."""


@dataclass(frozen=True, kw_only=True)
class RandomFlips(Settings):
    """The settings of what depends on (seed, epoch, id) only: random flips, and whatever else a task draws.

    Args:
        seed: seed of the random numbers, 0 or more.
        flip_probability: probability of a flip in each direction in which the task flips.
    """

    seed: int
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 1 << 63, f"seed must be from 0 to 2^63-1, not {self.seed}")
        require_share(flip_probability=self.flip_probability)

    def flips(self, numbers: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return 1 where uniform numbers of any shape say that an image is flipped, and 0 elsewhere."""
        return (numbers < self.flip_probability).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class RandomCrops(RandomFlips):
    """The settings of random windows, which have the distribution of torchvision's `RandomResizedCrop`.

    Args:
        random_area: bounds of the window's share of the image's area, drawn uniformly.
        random_aspect: bounds of the window's width / height, drawn uniformly in its logarithm.
    """

    random_area: Range = (0.08, 1.0)
    random_aspect: Range = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.random_area[0] <= min(1, self.random_area[1]) and self.random_area[1] < float("inf"),
            f"random_area must be (low, high) with 0 < low <= high and low at most 1, not {self.random_area}",
        )
        require(
            0 < self.random_aspect[0] <= self.random_aspect[1] < float("inf"),
            f"random_aspect must be (low, high) with 0 < low <= high, not {self.random_aspect}",
        )

    def draw_crops(self, uniforms: Floats) -> Floats:
        """Draw the random numbers of N crops, before the shapes of the images are known.

        Args:
            uniforms: (N, CROP_UNIFORMS), in [0, 1).

        Returns:
            (N, ATTEMPTS + 1, 2), height before width: the attempts' sizes in units of sqrt(H * W) pixels, and in the
            last row the window's position between the first (0) and the last (1) possible one.
        """
        shares, aspects = np.moveaxis(uniforms[:, :-2].reshape(-1, ATTEMPTS, 2), -1, 0)
        shares = self.random_area[0] + (self.random_area[1] - self.random_area[0]) * shares
        low, high = np.log(self.random_aspect)
        halves = np.exp((low + (high - low) * aspects) / 2)
        sides = np.sqrt(shares)
        return np.concatenate([np.stack([sides / halves, sides * halves], -1), uniforms[:, None, -2:]], 1)

    def crop_windows(self, shapes: Integers, draws: Floats) -> tuple[Integers, Integers]:
        """Compute the windows of images of these heights and widths (N, 2) from the result of `draw_crops`.

        The window is the first attempt that fits into the image. If none fits, it is the largest one in the centre with
        an aspect in random_aspect, as in torchvision's `RandomResizedCrop.make_params`. Sides have at least 1 pixel.

        Returns:
            starts, sizes: (N, 2) each, in pixels; y before x, height before width.
        """
        attempts = np.floor(draws[:, :-1] * np.sqrt(shapes.prod(1))[:, None, None] + 0.5)
        fits = ((attempts > 0) & (attempts <= shapes[:, None])).all(2)
        has_fit = fits.any(1)[:, None]
        low, high = self.random_aspect
        widest = np.rint(np.stack([shapes[:, 1] / low, shapes[:, 0] * high], 1)).clip(1, shapes)
        sizes = np.where(has_fit, attempts[np.arange(len(shapes)), fits.argmax(1)], widest).astype(np.int64)
        starts = np.where(has_fit, draws[:, -1] * (shapes - sizes + 1), (shapes - sizes) // 2).astype(np.int64)
        return starts, sizes


def resize(image: Pixels, size: Sequence[float] | NDArray[Any], mode: Interpolation = "bilinear") -> Pixels:
    """Resize an image (H, W, 3) to this height and width, as torchvision's resized_crop does after the crop."""
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    height, width = map(int, size)
    resized = interpolate(pixels, size=(height, width), mode=mode, antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).numpy()


def centre(shapes: Integers, shorter: int, side: int) -> tuple[Integers, Integers]:
    """Return where the centre of images lies that are resized by their shorter side.

    Args:
        shapes: heights and widths (..., 2) of the images.
        shorter: length of the resized shorter side, in pixels.
        side: height and width of the centre.

    Returns:
        Heights and widths of the whole resized images, and the first row and column of the centre in them, (..., 2).
    """
    resized = shorter * shapes // shapes.min(-1, keepdims=True)
    return resized, np.rint((resized - side) / 2).astype(np.int64)


def on_threads(function: Callable[..., Pixels]) -> Callable[..., list[Pixels]]:
    """Return a function that calls this one for each sample of a batch, on as many threads as torch has."""
    import torch

    threads = torch.get_num_threads()

    def whole_batch(*inputs: Sequence[NDArray[Any]]) -> list[Pixels]:
        samples = [*zip(*inputs, strict=True)]
        done: list[Any] = [None] * len(samples)

        def part(first: int) -> None:
            for i in range(first, len(samples), threads):
                done[i] = np.ascontiguousarray(function(*samples[i]))

        for _ in _pool(os.getpid(), threads).map(part, range(threads)):
            pass
        return done

    return whole_batch


# For each process, since a forked one has none of its parent's threads. The pipelines of a process share them.
@cache
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="resizing")


def resize_and_crop(image: Pixels, shorter: int, side: int, mode: Interpolation) -> Pixels:
    """Return the centre (side, side, 3) of an image resized to this shorter side: Resize and CenterCrop."""
    if _is_thin(image.shape[:2], shorter):
        from PIL import Image

        return np.asarray(pillow_centre(Image.fromarray(image), shorter, side, mode))
    resized, (top, left) = centre(np.array(image.shape[:2]), shorter, side)
    return resize(image, resized, mode)[top : top + side, left : left + side]


def pillow_centre(image: "Image.Image", shorter: int, side: int, mode: Interpolation) -> "Image.Image":
    """Return the same by Pillow and torchvision; of a thin image only the centre is computed."""
    from PIL import Image
    from torchvision.transforms import functional as F

    if not _is_thin(image.size, shorter):
        resized = F.resize(image, [shorter], interpolation=F.InterpolationMode(mode))
        cropped: Image.Image = F.center_crop(resized, [side])
        return cropped
    whole, start = centre(np.array(image.size), shorter, side)
    scale = np.array(image.size) / whole
    box = (*(start * scale).tolist(), *((start + side) * scale).tolist())
    return image.resize((side, side), Image.Resampling[mode.upper()], box)


def _is_thin(shape: tuple[int, ...], shorter: int) -> bool:
    """Return whether an image resized to this shorter side has too many pixels to be computed as a whole."""
    return shorter * shorter * max(shape) > MAX_RESIZED * min(shape)
