"""Small videos made on the spot, and the frames that PyAV decodes of them."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from raydali.data.tasks.video_pyav import COLOURS

Frames = NDArray[np.uint8]

ENCODERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "vp8": ("libvpx", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "b": "400k"}),
    "vp9": ("libvpx-vp9", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "crf": "20", "b": "0"}),
    "mjpeg": ("mjpeg", "yuvj420p", {"q:v": "3"}),
    "h264": ("libx264", "yuv420p", {"preset": "veryfast", "crf": "20"}),
    "hevc": ("libx265", "yuv420p", {"preset": "ultrafast", "crf": "20", "x265-params": "log-level=none"}),
    "mpeg4": ("mpeg4", "yuv420p", {"q:v": "3"}),
}
"""FFmpeg's name, pixel format and options of each codec's encoder."""


def moving(frames: int, *, height: int = 48, width: int = 64, start: int = 0) -> Frames:
    """Frames (frames, height, width, 3) of which no two are alike: soft waves that run, and a brightness that grows."""
    y, x = np.mgrid[:height, :width]
    time = np.arange(start, start + frames)[:, None, None]
    waves = [np.sin(x / 9 + time / 3), np.cos(y / 7 - time / 4), np.sin((x + y) / 11 + time / 5)]
    light = 60 + 3 * (time % 40)
    return np.stack([(light + 40 * (1 + wave)) for wave in waves], -1).clip(0, 255).astype(np.uint8)


def write_video(
    path: Path,
    frames: Frames,
    codec: str,
    *,
    keyframe_every: int = 12,
    milliseconds: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Path:
    """Encode frames, at 25 a second or at these times."""
    encoder, pixels, usual = ENCODERS[codec]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream: Any = container.add_stream(encoder, rate=25, options=usual | (options or {}))
        stream.codec_context.thread_count = 1  # the same file each time
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
        stream.gop_size = keyframe_every
        stream.codec_context.time_base = Fraction(1, 25) if milliseconds is None else Fraction(1, 1000)
        if codec == "mjpeg":
            stream.color_range = 2
        for i, pixel_values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixel_values, format="rgb24")
            frame.pts = i if milliseconds is None else milliseconds[i]
            frame.time_base = stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def alternate_references(codec: str) -> Path:
    """A video of 60 frames, 144 x 160 pixels, with more that are decoded and never shown.

    It is `moving` in two passes of
    ffmpeg -f rawvideo ... -c:v libvpx[-vp9] -b:v 50k -g 30 -deadline good -auto-alt-ref 1 -lag-in-frames 25 -pass 1, 2
    """
    return Path(__file__).with_name(f"alt_ref.{codec}.webm")


def uneven(frames: int) -> list[int]:
    """Times in milliseconds of a variable frame rate."""
    return list(accumulate((40 if i % 3 else 120 for i in range(1, frames)), initial=0))


def decoded_by_pyav(path: Path) -> Frames:
    """All frames of a file, straight through."""
    with av.open(str(path)) as container:
        return np.stack(
            [frame.to_ndarray(format="rgb24", interpolation=COLOURS) for frame in container.decode(video=0)]
        )
