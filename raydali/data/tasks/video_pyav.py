"""Decoding of clips by FFmpeg, through PyAV."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from raydali.data.sources.video.clips import VideoClips
from raydali.data.sources.video.packets import ClipPackets, Part, pts

if TYPE_CHECKING:
    from av import VideoFrame

# By default, FFmpeg repeats pixels of the colours, which are coded at half the size.
COLOURS = int(Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND)
_WHOLE = Part(slice(None), slice(None))
T = TypeVar("T")


def rgb_clip(source: VideoClips, id: int, part: Part = _WHOLE) -> NDArray[np.uint8]:
    """Return the frames of a clip, or a part of the coded ones, upright: (sequence_length, height, width, 3) RGB.

    Raises:
        OSError: the video cannot be read or decoded.
    """
    orientation = source.orientation(id)

    def rgb(frame: "VideoFrame") -> NDArray[np.uint8]:
        pixels = np.asarray(frame.to_ndarray(format="rgb24", interpolation=COLOURS), np.uint8)
        pixels = pixels.view("V3")[part].swapaxes(0, int(orientation.transposed))  # V3: copies whole pixels, faster
        return np.flip(pixels, orientation.reversed_axes).copy().view(np.uint8)

    with source.cut(id) as cut:
        return np.stack(decoded(cut, rgb))


def decoded(cut: ClipPackets, convert: Callable[["VideoFrame"], T]) -> list[T]:
    """Decode the frames of a clip, and return the result of `convert` for each.

    Raises:
        ValueError: some frames cannot be decoded.
    """
    context = cut.stream.codec_context
    if not context.is_open:
        context.thread_count = 1  # several clips are decoded in parallel
    wanted, found = set(cut.times), {}
    for packet in [*cut.packets, None]:  # None flushes the decoder
        if packet is not None:
            packet.pts = pts(packet)
        for frame in context.decode(packet):
            if frame.pts in wanted:
                found[frame.pts] = convert(frame)
        if len(found) == len(wanted):
            return [found[time] for time in cut.times]
    raise ValueError(f"{len(wanted) - len(found)} of {len(wanted)} frames cannot be decoded")
