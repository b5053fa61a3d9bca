"""The built-in videos, for runs without data: discs that move left, right, up or down.

No single frame shows the direction, so a network must use several to learn it.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from raydali.data.index.cache import built_in_folder
from raydali.extras import require_extra

FRAMES = 16
SIDE = 64
"""Side of the frames, pixels: the smallest that GPUs decode."""
DIRECTIONS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}
_VIDEOS = {"train": 80, "val": 20}
_SPEEDS = (1.5, 3.0)
_RADII = (6.0, 12.0)


def moving_discs_folder() -> str:
    """Return the folder of `train/` (320 videos) and `val/` (80), with a class folder for each direction.

    See `built_in_folder`. Videos are 16 frames of 64 x 64 pixels, MJPEG in AVI.

    Raises:
        UsageError: the cache cannot be written, or PyAV is not installed.
    """
    return built_in_folder("moving-discs-v1", _write)


def _write(folder: Path) -> None:
    require_extra("video", "av", "videos")
    for split, (name, videos) in enumerate(_VIDEOS.items()):
        for label, (direction, (y, x)) in enumerate(DIRECTIONS.items()):
            below = folder / name / direction
            below.mkdir(parents=True)
            for i in range(videos):
                _encode(below / f"{i:03}.avi", _frames(np.random.default_rng([split, label, i]), y, x))


def _frames(random: Generator, y: int, x: int) -> NDArray[np.uint8]:
    """Draw a bright disc on a dark background, (FRAMES, SIDE, SIDE, 3)."""
    dark, bright = random.integers(0, 100, 3), random.integers(140, 256, 3)
    radius, speed = random.uniform(*_RADII), random.uniform(*_SPEEDS)
    middle = random.uniform(20, SIDE - 20, 2)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    frames = np.empty((FRAMES, SIDE, SIDE, 3), np.uint8)
    for time in range(FRAMES):
        shift = speed * (time - (FRAMES - 1) / 2)
        centre_y, centre_x = middle + shift * np.array([y, x])
        inside = (rows - centre_y) ** 2 + (columns - centre_x) ** 2 < radius**2
        frames[time] = np.where(inside[..., None], bright, dark)
    return frames


def _encode(path: Path, frames: NDArray[np.uint8]) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mjpeg", rate=25, options={"q:v": "3"})
        stream.height, stream.width, stream.pix_fmt, stream.color_range = SIDE, SIDE, "yuvj420p", 2
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
