"""Small videos made on the spot, and the frames that PyAV decodes of them."""

import os
import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
COLOURS = int(Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND)
"""FFmpeg's accurate conversion to RGB."""

Rotation = tuple[int, bool, bool]
"""Degrees counterclockwise, and whether the result is mirrored horizontally and vertically."""

UPRIGHT: Rotation = (0, False, False)
ROTATIONS: list[Rotation] = [
    (90, False, False),
    (-90, False, False),
    (180, False, False),
    (0, True, False),
    (0, False, True),
    (90, True, False),
    (-90, True, False),
]
"""All of EXIF's orientations but the upright one."""

ENCODERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "vp8": ("libvpx", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "b": "400k"}),
    "vp9": ("libvpx-vp9", "yuv420p", {"deadline": "realtime", "cpu-used": "8", "crf": "20", "b": "0"}),
    "mjpeg": ("mjpeg", "yuvj420p", {"q:v": "3"}),
    "h264": ("libx264", "yuv420p", {"preset": "veryfast", "crf": "20"}),
    "h264rgb": ("libx264rgb", "rgb24", {"preset": "veryfast", "crf": "0"}),
    "hevc": ("libx265", "yuv420p", {"preset": "ultrafast", "crf": "20", "x265-params": "log-level=none"}),
    "mpeg4": ("mpeg4", "yuv420p", {"q:v": "3"}),
    "av1": ("libsvtav1", "yuv420p", {"preset": "12", "crf": "20"}),
    "prores": ("prores_ks", "yuv422p10le", {}),
    "ffv1": ("ffv1", "bgr0", {}),
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
    rotation: Rotation = UPRIGHT,
) -> Path:
    """Encode frames, at 25 a second or at these times; players turn them by the rotation."""
    encoder, pixels, usual = ENCODERS[codec]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream: Any = container.add_stream(encoder, rate=25, options=usual | (options or {}))
        stream.codec_context.thread_count = 1  # the same file each time
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
        stream.gop_size = keyframe_every
        if rotation != UPRIGHT:
            stream.set_display_rotation(*rotation)
        stream.codec_context.time_base = Fraction(1, 25) if milliseconds is None else Fraction(1, 1000)
        if codec == "mjpeg":
            stream.color_range = 2
        for i, pixel_values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixel_values, format="rgb24")
            frame.pts = i if milliseconds is None else milliseconds[i]
            frame.time_base = stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    # SVT-AV1 makes its process one of real time if it may, and the tests after this one would starve the machine.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
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


def upright_by_ffmpeg(path: Path) -> Frames:
    """All frames of a file, turned by FFmpeg's filters as ffplay and ffmpeg choose them (fftools/ffmpeg_filter.c)."""
    with av.open(str(path)) as container:
        first = next(container.decode(video=0))
    side_data: Any = first.side_data
    if (stored := side_data.get("DISPLAYMATRIX")) is None:
        return decoded_by_pyav(path)
    matrix = struct.unpack("9i", bytes(stored))
    filters = {
        90: [("transpose", "cclock_flip" if matrix[3] > 0 else "clock")],
        180: [("hflip", "")] * (matrix[0] < 0) + [("vflip", "")] * (matrix[4] < 0),
        270: [("transpose", "clock_flip" if matrix[3] < 0 else "cclock")],
        0: [("vflip", "")] * (matrix[4] < 0),
    }[-first.rotation % 360]
    frames = []
    for pixels in decoded_by_pyav(path):
        graph: Any = av.filter.Graph()
        height, width = pixels.shape[:2]
        graph.link_nodes(
            graph.add_buffer(width=width, height=height, format="rgb24", time_base=Fraction(1, 25)),
            *(graph.add(name, arguments) for name, arguments in filters),
            graph.add("buffersink"),
        ).configure()
        graph.push(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
        frames.append(graph.pull().to_ndarray())
    return np.stack(frames)


def decoded_by_pyav(path: Path) -> Frames:
    """All frames of a file as they are coded, straight through."""
    with av.open(str(path)) as container:
        return np.stack(
            [frame.to_ndarray(format="rgb24", interpolation=COLOURS) for frame in container.decode(video=0)]
        )


def filtered_by_ffmpeg(path: Path, *filters: tuple[str, str]) -> Frames:
    """All frames of a file after these filters of FFmpeg, each with its arguments."""
    with av.open(str(path)) as container:
        graph: Any = av.filter.Graph()
        graph.link_nodes(
            graph.add_buffer(template=container.streams.video[0]),
            *(graph.add(name, arguments) for name, arguments in filters),
            graph.add("buffersink"),
        ).configure()
        frames = []
        for frame in container.decode(video=0):
            graph.push(frame)
            frames.append(graph.pull().to_ndarray())
    return np.stack(frames)
