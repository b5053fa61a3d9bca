"""Synthetic videos for the measurement of loaders: a window that moves over noise.

The cost of decoding a video depends on its codec, its pixels and its bytes. A few videos are encoded, on all cores; the
others are hard links to them.
"""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from raydali.bench.synthetic_images import folder_or, on_all_cores, texture

VideoCodec = Literal["h264", "vp9", "mjpeg"]
ENCODED = 32
"""Maximum number of different videos; further ones are links."""
CLASSES = 4
_ENCODERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "h264": ("libx264", "mp4", "yuv420p", {"preset": "veryfast", "crf": "23", "threads": "1"}),
    "vp9": ("libvpx-vp9", "webm", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "crf": "32", "b": "0"}),
    "mjpeg": ("mjpeg", "avi", "yuvj420p", {"q:v": "5"}),
}
"""For each codec the name of FFmpeg's encoder, the file suffix, the pixel format and options."""
_PAN = 3
"""Pixels per frame."""


@dataclass(frozen=True)
class VideoSet:
    """A set of synthetic videos.

    Attributes:
        videos: number of videos.
        frames: number of frames of each video, at 30 per second.
        height: height in pixels; the width is 16/9 of it.
        keyframe_every: number of frames from one keyframe to the next.
    """

    codec: VideoCodec
    videos: int
    frames: int
    height: int
    keyframe_every: int = 30


def synthetic_videos(folder: str | None, wanted: VideoSet) -> AbstractContextManager[str]:
    """Enter with the folder; if it is None, with a temporary one of synthetic videos."""
    return folder_or(folder, lambda temporary: write_videos(temporary, wanted))


def write_videos(root: str, wanted: VideoSet) -> None:
    """Write the videos into class folders below root, always the same."""
    for label in range(min(CLASSES, wanted.videos)):
        Path(root, f"{label:02}").mkdir(parents=True)
    encoded = range(min(wanted.videos, ENCODED))
    on_all_cores(partial(_encode, root, wanted), encoded)
    for i in range(len(encoded), wanted.videos):
        os.link(_path(root, wanted, i % ENCODED), _path(root, wanted, i))


def _path(root: str, wanted: VideoSet, i: int) -> Path:
    return Path(root, f"{i % CLASSES:02}", f"{i:06}.{_ENCODERS[wanted.codec][1]}")


def _encode(root: str, wanted: VideoSet, i: int) -> None:
    import av
    import numpy as np

    encoder, _, pixels, options = _ENCODERS[wanted.codec]
    height, width = wanted.height, wanted.height * 16 // 9 // 2 * 2
    random = np.random.default_rng([1, i])
    reach = _PAN * wanted.frames
    noise = np.roll(texture(), random.integers(0, 1024, 2), (0, 1))
    light = 128 + 48 * np.tile(noise, (height // 1024 + 1, (width + reach) // 1024 + 1))[:height, : width + reach]
    tint = 12 * random.standard_normal(3)
    picture = (light[..., None] + tint).clip(0, 255).astype(np.uint8)
    with av.open(str(_path(root, wanted, i)), "w") as container:
        stream: Any = container.add_stream(encoder, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = height, width, pixels, wanted.keyframe_every
        if wanted.codec == "mjpeg":
            stream.color_range = 2
        for time in range(wanted.frames):
            window = np.ascontiguousarray(picture[:, _PAN * time : _PAN * time + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())
