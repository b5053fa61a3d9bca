"""Synthetic images and videos for the measurement of loaders: noise that costs a decoder as much as photographs do.

The spectra of photographs and of this noise decrease as 1 / frequency (D. J. Field, "Relations between the
statistics of natural images and the response properties of cortical cells", 1987). The cost of decoding a JPEG depends
on its size in bytes and in pixels; both equal ImageNet's on average. A video is a window that moves over noise. Its
cost depends on its codec, its pixels and its bytes. A few videos are encoded; the others are hard links to them.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.processes import interrupted_later
from raydali.host.cpu_times import usable_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGE_CLASSES, VIDEO_CLASSES = 16, 4
QUALITY = 92
SIDES = (333, 500)
"""Shortest and longest side in pixels; each image has a side of the longest length."""
_TEXTURE_SIDE = 1024
_CONTRAST, _COLOUR = 48, 12
_PART = 128
"""Images that a process writes at a time."""

VideoCodec = Literal["h264", "vp9", "mjpeg"]
ENCODED = 32
"""Maximum number of different videos; further ones are links."""
KEYFRAME_EVERY = 30
_ENCODERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "h264": ("libx264", "mp4", "yuv420p", {"preset": "veryfast", "crf": "23", "threads": "1"}),
    "vp9": ("libvpx-vp9", "webm", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "crf": "32", "b": "0"}),
    "mjpeg": ("mjpeg", "avi", "yuvj420p", {"q:v": "5"}),
}
"""For each codec the name of FFmpeg's encoder, the file suffix, the pixel format and options."""
_PAN = 3
"""Pixels per frame."""


@contextmanager
def folder_or(folder: str | None, write: Callable[[str], object]) -> Iterator[str]:
    """Yield the folder; if it is None, a temporary one that `write` has filled."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="raydali-bench-") as temporary:
        write(temporary)
        yield temporary


def write_images(root: str, count: int) -> None:
    """Write `count` JPEGs into class folders below root: 333x500 to 500x500 pixels, quality 92, always the same."""
    _make_folders(root, min(IMAGE_CLASSES, count))
    _on_all_cores(partial(_write, root), [range(first, min(first + _PART, count)) for first in range(0, count, _PART)])


@dataclass(frozen=True)
class VideoSet:
    """A set of synthetic videos.

    Attributes:
        videos: number of videos.
        frames: number of frames of each video, at 30 per second.
        height: height in pixels; the width is 16/9 of it.
    """

    codec: VideoCodec
    videos: int
    frames: int
    height: int

    def path(self, root: str, i: int) -> Path:
        """Return the path of a video."""
        return Path(root, f"{i % VIDEO_CLASSES:02}", f"{i:06}.{_ENCODERS[self.codec][1]}")


def write_videos(root: str, wanted: VideoSet) -> None:
    """Write the videos into class folders below root, always the same."""
    _make_folders(root, min(VIDEO_CLASSES, wanted.videos))
    encoded = range(min(wanted.videos, ENCODED))
    _on_all_cores(partial(_encode, root, wanted), encoded)
    for i in range(len(encoded), wanted.videos):
        os.link(wanted.path(root, i % ENCODED), wanted.path(root, i))


def _make_folders(root: str, classes: int) -> None:
    for label in range(classes):
        Path(root, f"{label:02}").mkdir(parents=True)


def _on_all_cores(write: Callable[[Any], object], parts: Sequence[Any]) -> None:
    """Call `write` for each part, in as many processes as there are cores."""
    processes = min(len(parts), usable_cores())
    if processes < 2:
        for part in parts:
            write(part)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        with interrupted_later():  # a process whose start is interrupted would print a traceback
            written = pool.map(write, parts)
        list(written)


def _write(root: str, part: range) -> None:
    for i in part:
        Path(root, f"{i % IMAGE_CLASSES:02}", f"{i:06}.jpg").write_bytes(_jpeg(i))


def _jpeg(i: int) -> bytes:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng([0, i])
    sides = [SIDES[1], int(random.integers(SIDES[0], SIDES[1] + 1))]
    random.shuffle(sides)
    height, width = sides

    def crop() -> "NDArray[np.float32]":
        y, x = random.integers(0, _TEXTURE_SIDE - SIDES[1], 2)
        part = _texture()[y : y + height, x : x + width]
        return part[:: random.choice([-1, 1]), :: random.choice([-1, 1])]

    light, red, blue = 128 + _CONTRAST * crop(), _COLOUR * crop(), _COLOUR * crop()
    rgb = np.stack([light + red, light, light + blue], -1)
    data = io.BytesIO()
    Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


@cache
def _texture() -> "NDArray[np.float32]":
    """Return noise (1024, 1024) of mean 0 and deviation 1 whose amplitudes fall as 1 / frequency."""
    import numpy as np

    random = np.random.default_rng(0)
    side = _TEXTURE_SIDE
    frequencies = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequencies[0, 0] = np.inf
    real, imaginary = random.standard_normal(frequencies.shape), random.standard_normal(frequencies.shape)
    noise = np.fft.irfft2((real + 1j * imaginary) / frequencies, s=(side, side))
    return np.asarray(noise / noise.std(), np.float32)


def _encode(root: str, wanted: VideoSet, i: int) -> None:
    import av
    import numpy as np

    encoder, _, pixels, options = _ENCODERS[wanted.codec]
    height, width = wanted.height, wanted.height * 16 // 9 // 2 * 2
    random = np.random.default_rng([1, i])
    reach = _PAN * wanted.frames
    noise = np.roll(_texture(), random.integers(0, _TEXTURE_SIDE, 2), (0, 1))
    tiles = height // _TEXTURE_SIDE + 1, (width + reach) // _TEXTURE_SIDE + 1
    light = 128 + _CONTRAST * np.tile(noise, tiles)[:height, : width + reach]
    tint = _COLOUR * random.standard_normal(3)
    picture = (light[..., None] + tint).clip(0, 255).astype(np.uint8)
    with av.open(str(wanted.path(root, i)), "w") as container:
        stream: Any = container.add_stream(encoder, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height, width, pixels, KEYFRAME_EVERY
        if wanted.codec == "mjpeg":
            stream.color_range = 2
        for time in range(wanted.frames):
            window = np.ascontiguousarray(picture[:, _PAN * time : _PAN * time + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())
