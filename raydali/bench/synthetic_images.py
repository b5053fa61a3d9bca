"""Synthetic images for the measurement of loaders: noise that a decoder needs as much time for as for photographs.

The spectra of photographs and of this noise decrease as 1 / frequency (D. J. Field, "Relations between the
statistics of natural images and the response properties of cortical cells", 1987). The cost of decoding a JPEG depends
on its size in bytes and in pixels; both equal ImageNet's on average.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raydali.host.cpu_times import usable_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator
    from numpy.typing import NDArray

CLASSES = 16
QUALITY = 92
SIDES = (333, 500)
"""Shortest and longest side in pixels; each image has a side of the longest length."""
_TEXTURE_SIDE = 1024
_CONTRAST = 48
_COLOUR = 12
_PART = 128


def synthetic_images(folder: str | None, count: int) -> AbstractContextManager[str]:
    """Enter with the folder; if it is None, with a temporary one of `count` images, 130 KB each on average."""
    return folder_or(folder, lambda temporary: write_images(temporary, count))


def write_images(root: str, count: int) -> None:
    """Write `count` JPEGs into class folders below root: 333x500 to 500x500 pixels, quality 92, always the same."""
    for label in range(min(CLASSES, count)):
        Path(root, f"{label:02}").mkdir()
    on_all_cores(partial(_write, root), [range(first, min(first + _PART, count)) for first in range(0, count, _PART)])


@contextmanager
def folder_or(folder: str | None, write: Callable[[str], object]) -> Iterator[str]:
    """Yield the folder; if it is None, a temporary one that `write` has filled."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="raydali-bench-") as temporary:
        write(temporary)
        yield temporary


def on_all_cores(write: Callable[[Any], object], parts: Sequence[Any]) -> None:
    """Call `write` for each part, in as many processes as there are cores."""
    processes = min(len(parts), usable_cores())
    if processes < 2:
        for part in parts:
            write(part)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(write, parts))


def _write(root: str, part: range) -> None:
    for i in part:
        Path(root, f"{i % CLASSES:02}", f"{i:06}.jpg").write_bytes(_jpeg(i))


def _jpeg(i: int) -> bytes:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng([0, i])
    sides = [SIDES[1], int(random.integers(SIDES[0], SIDES[1] + 1))]
    random.shuffle(sides)
    grey, red, blue = (_random_crop(texture(), random, *sides) for _ in range(3))
    light = 128 + _CONTRAST * grey
    rgb = np.stack([light + _COLOUR * red, light, light + _COLOUR * blue], -1)
    data = io.BytesIO()
    Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def _random_crop(texture: "NDArray[np.float32]", random: "Generator", height: int, width: int) -> "NDArray[np.float32]":
    y, x = random.integers(0, _TEXTURE_SIDE - SIDES[1], 2)
    return texture[y : y + height, x : x + width][:: random.choice([-1, 1]), :: random.choice([-1, 1])]


@cache
def texture() -> "NDArray[np.float32]":
    """Return noise (1024, 1024) of mean 0 and deviation 1 whose amplitudes fall as 1 / frequency."""
    import numpy as np

    random = np.random.default_rng(0)
    side = _TEXTURE_SIDE
    frequencies = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequencies[0, 0] = np.inf
    real, imaginary = random.standard_normal(frequencies.shape), random.standard_normal(frequencies.shape)
    noise = np.fft.irfft2((real + 1j * imaginary) / frequencies, s=(side, side))
    return np.asarray(noise / noise.std(), np.float32)
