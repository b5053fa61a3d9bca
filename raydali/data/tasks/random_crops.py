"""Random resized crops as torchvision draws them, but from numbers that depend on (seed, epoch, id) alone.

    uniforms (N, 22)  --draw_crops-->  draws (N, 11, 2)  --crop_windows-->  starts, sizes (N, 2)
    from data/stream/counter_rng.py                    no shape needed       + image shapes

The work is split where the image's shape comes in: `draw_crops` runs on the host before anything is read,
`crop_windows` wherever shapes are known. Whatever the shape, the windows have the distribution of
`torchvision.transforms.v2.RandomResizedCrop`.
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
        last row the window's place between the first (0) and the last (1) of those possible.
    """
    shares, aspects = np.moveaxis(uniforms[:, :-2].reshape(-1, ATTEMPTS, 2), -1, 0)
    shares = random_area[0] + (random_area[1] - random_area[0]) * shares
    low, high = np.log(random_aspect)
    halves = np.exp((low + (high - low) * aspects) / 2)
    sides = np.sqrt(shares)
    return np.concatenate([np.stack([sides / halves, sides * halves], -1), uniforms[:, None, -2:]], 1)


def crop_windows(shapes: Integers, draws: Floats, random_aspect: Range) -> tuple[Integers, Integers]:
    """The windows that draws of `draw_crops` give in images of these shapes, in pixels.

    The first attempt that fits inside the image counts; if none does, the window is the largest in the centre
    whose aspect is in random_aspect (`RandomResizedCrop.make_params` of torchvision; where that gives a side of
    0 pixels, which no image can have, it is 1 here).

    Args:
        shapes: (N, 2), height and width of each image.
        draws: (N, ATTEMPTS + 1, 2).
        random_aspect: as given to `draw_crops`.

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
