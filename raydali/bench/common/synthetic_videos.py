"""Videos to measure loaders with, for those who have none at hand: noise like photographs', panned.

What a video costs to decode goes by its codec, its pixels and its bytes. A few videos are encoded, in as many processes
as there are cores, and the others are links to them.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from raydali.bench.common.synthetic_images import texture
from raydali.host.cpu_times import usable_cores

VideoCodec = Literal["h264", "vp9", "mjpeg"]
ENCODED = 32
"""Different videos; further ones are links."""
CLASSES = 4
_ENCODERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "h264": ("libx264", "mp4", "yuv420p", {"preset": "veryfast", "crf": "23", "threads": "1"}),
    "vp9": ("libvpx-vp9", "webm", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "crf": "32", "b": "0"}),
    "mjpeg": ("mjpeg", "avi", "yuvj420p", {"q:v": "5"}),
}
"""FFmpeg's name, the files' ending, pixel format and options."""
_PAN = 3
"""Pixels a frame."""


@dataclass(frozen=True)
class Made:
    """What videos are made.

    Attributes:
        videos: how many.
        frames: of each, at 30 a second.
        height: pixels; the width is 16/9 of it.
        keyframe_every: frames.
    """

    codec: VideoCodec
    videos: int
    frames: int
    height: int
    keyframe_every: int = 30


@contextmanager
def made_videos(folder: str | None, made: Made) -> Iterator[str]:
    """The folder itself; with none, one of made videos in class folders, which is gone afterwards."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="raydali-bench-") as temporary:
        make_videos(temporary, made)
        yield temporary


def make_videos(root: str, made: Made) -> None:
    """Write the videos into class folders below root, the same each time."""
    for label in range(min(CLASSES, made.videos)):
        Path(root, f"{label:02}").mkdir(parents=True)
    encoded = range(min(made.videos, ENCODED))
    processes = min(len(encoded), usable_cores())
    if processes < 2:
        for i in encoded:
            _encode(root, made, i)
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(_encode, root, made), encoded))
    for i in range(len(encoded), made.videos):
        os.link(_path(root, made, i % ENCODED), _path(root, made, i))


def _path(root: str, made: Made, i: int) -> Path:
    return Path(root, f"{i % CLASSES:02}", f"{i:06}.{_ENCODERS[made.codec][1]}")


def _encode(root: str, made: Made, i: int) -> None:
    import av
    import numpy as np

    encoder, _, pixels, options = _ENCODERS[made.codec]
    height, width = made.height, made.height * 16 // 9 // 2 * 2
    random = np.random.default_rng([1, i])
    reach = _PAN * made.frames
    noise = np.roll(texture(), random.integers(0, 1024, 2), (0, 1))
    light = 128 + 48 * np.tile(noise, (height // 1024 + 1, (width + reach) // 1024 + 1))[:height, : width + reach]
    tint = 12 * random.standard_normal(3)
    picture = (light[..., None] + tint).clip(0, 255).astype(np.uint8)
    with av.open(str(_path(root, made, i)), "w") as container:
        stream: Any = container.add_stream(encoder, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height, width, pixels, made.keyframe_every
        if made.codec == "mjpeg":
            stream.color_range = 2
        for time in range(made.frames):
            window = np.ascontiguousarray(picture[:, _PAN * time : _PAN * time + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())
