"""Random resized crops with torchvision's distribution, from numbers that depend on (seed, epoch, id) only.

    uniforms (N, 22)  --draw_crops-->  draws (N, 11, 2)  --crop_windows-->  starts, sizes (N, 2)
    from data/stream/counter_rng.py                    no shape needed       + image shapes

`draw_crops` runs on the host before files are read, and `crop_windows` when the shapes of images are known. For any
shape, the windows have the distribution of `torchvision.transforms.v2.RandomResizedCrop`.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Range = tuple[float, float]

ATTEMPTS = 10
CROP_UNIFORMS = 2 * ATTEMPTS + 2


def draw_crops(uniforms: Floats, random_area: Range, random_aspect: Range) -> Floats:
    """Draw the random numbers of N crops, before the shapes of the images are known.

    Args:
        uniforms: (N, CROP_UNIFORMS), in [0, 1).
        random_area: bounds of the window's share of the image's area, drawn uniformly.
        random_aspect: bounds of the window's width / height, drawn uniformly in its logarithm.

    Returns:
        (N, ATTEMPTS + 1, 2), height before width: the attempts' sizes in units of sqrt(H * W) pixels, and in the
        last row the window's position between the first (0) and the last (1) possible one.
    """
    shares, aspects = np.moveaxis(uniforms[:, :-2].reshape(-1, ATTEMPTS, 2), -1, 0)
    shares = random_area[0] + (random_area[1] - random_area[0]) * shares
    low, high = np.log(random_aspect)
    halves = np.exp((low + (high - low) * aspects) / 2)
    sides = np.sqrt(shares)
    return np.concatenate([np.stack([sides / halves, sides * halves], -1), uniforms[:, None, -2:]], 1)


def crop_windows(shapes: Integers, draws: Floats, random_aspect: Range) -> tuple[Integers, Integers]:
    """Compute the windows, in pixels, of images of these shapes from the result of `draw_crops`.

    The window is the first attempt that fits into the image. If none fits, it is the largest one in the centre with an
    aspect in random_aspect, as in torchvision's `RandomResizedCrop.make_params`. Sides have at least 1 pixel.

    Args:
        shapes: (N, 2), height and width of each image.
        draws: (N, ATTEMPTS + 1, 2).
        random_aspect: the argument of `draw_crops`.

    Returns:
        starts, sizes: (N, 2) each; y before x, height before width.
    """
    attempts = np.floor(draws[:, :-1] * np.sqrt(shapes.prod(1))[:, None, None] + 0.5)
    fits = ((attempts > 0) & (attempts <= shapes[:, None])).all(2)
    found = fits.any(1)[:, None]
    low, high = random_aspect
    widest = np.rint(np.stack([shapes[:, 1] / low, shapes[:, 0] * high], 1)).clip(1, shapes)
    sizes = np.where(found, attempts[np.arange(len(shapes)), fits.argmax(1)], widest).astype(np.int64)
    starts = np.where(found, draws[:, -1] * (shapes - sizes + 1), (shapes - sizes) // 2).astype(np.int64)
    return starts, sizes
