"""Images to measure loaders with, for those who have none at hand: noise that costs a decoder what photographs do.

Photographs have spectra that fall as 1 / frequency, and so has this noise (D. J. Field, "Relations between the
statistics of natural images and the response properties of cortical cells", 1987). What a JPEG costs to decode goes
by its size in bytes and in pixels, and both are ImageNet's on average.
"""

import io
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raydali.host.cpu_times import usable_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CLASSES = 16
QUALITY = 92
SIDES = (333, 500)
"""Of the images, pixels: one is the longest, the other anything between."""
_TEXTURE_SIDE = 1024
_CONTRAST = 48
_COLOUR = 12
_PART = 128


@contextmanager
def photographs(folder: str | None, make: int) -> Iterator[str]:
    """The folder itself; with none, one of `make` images (130 KB each on average), which is gone afterwards."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="raydali-bench-") as made:
        make_photographs(made, make)
        yield made


def make_photographs(root: str, count: int) -> None:
    """Write `count` JPEGs into class folders below root: 333x500 to 500x500 pixels, quality 92, the same each time."""
    for label in range(min(CLASSES, count)):
        Path(root, f"{label:02}").mkdir()
    parts = [range(first, min(first + _PART, count)) for first in range(0, count, _PART)]
    processes = min(len(parts), usable_cores())
    if processes < 2:
        for part in parts:
            _write(root, part)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_write, root), parts))


def _write(root: str, part: range) -> None:
    for i in part:
        Path(root, f"{i % CLASSES:02}", f"{i:06}.jpg").write_bytes(_photograph(i))


def _photograph(i: int) -> bytes:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng([0, i])
    sides = [SIDES[1], int(random.integers(SIDES[0], SIDES[1] + 1))]
    random.shuffle(sides)
    grey, red, blue = (_cut(texture(), random, *sides) for _ in range(3))
    light = 128 + _CONTRAST * grey
    rgb = np.stack([light + _COLOUR * red, light, light + _COLOUR * blue], -1)
    data = io.BytesIO()
    Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def _cut(texture: "NDArray[np.float32]", random: Any, height: int, width: int) -> "NDArray[np.float32]":
    y, x = random.integers(0, _TEXTURE_SIDE - SIDES[1], 2)
    return texture[y : y + height, x : x + width][:: random.choice([-1, 1]), :: random.choice([-1, 1])]


@cache
def texture() -> "NDArray[np.float32]":
    """Noise of mean 0 and deviation 1 whose amplitudes fall as 1 / frequency: many images are cut out of one."""
    import numpy as np

    random = np.random.default_rng(0)
    side = _TEXTURE_SIDE
    frequencies = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequencies[0, 0] = np.inf
    spectrum = (
        random.standard_normal(frequencies.shape) + 1j * random.standard_normal(frequencies.shape)
    ) / frequencies
    noise = np.fft.irfft2(spectrum, s=(side, side))
    return np.asarray(noise / noise.std(), np.float32)
