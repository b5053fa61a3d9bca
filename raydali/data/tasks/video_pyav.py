"""Clips decoded by FFmpeg, through PyAV, and what the baseline loader makes of them by torch.

The baseline's frames are those of video_dali.py on the CPU, bit for bit; resized ones differ as in
classification_dali.py.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from av.video.reformatter import Interpolation
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.sources.video.clips import VideoClips
from raydali.data.sources.video.packets import ClipPackets, pts
from raydali.data.tasks.video import Clips, Part

# FFmpeg's own default is to repeat the colours, which are coded at half the size.
COLOURS = int(Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND)
_WHOLE = Part(slice(None), slice(None))
T = TypeVar("T")


def clip_sample(settings: Clips, source: VideoClips, id: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Clips.sample`."""
    ids = np.array([id])
    crops = settings.crops(source, ids, np.array([epoch]))
    (height, width), (top, left) = crops.resized[0].tolist(), crops.starts[0].tolist()
    frames = torch.from_numpy(rgb_clip(source, id)).permute(0, 3, 1, 2)
    frames = F.interpolate(frames, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    frames = frames[:, :, top : top + settings.image_size, left : left + settings.image_size]
    if crops.flips[0]:
        frames = frames.flip(3)
    return frames.permute(1, 0, 2, 3).contiguous(), torch.tensor(int(source.labels(ids)[0]))


def rgb_clip(source: VideoClips, id: int, part: Part = _WHOLE) -> NDArray[np.uint8]:
    """The frames of a clip, (sequence_length, height, width, 3) RGB.

    Raises:
        OSError: the video cannot be read or decoded; names its path.
    """

    def rgb(frame: Any) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24", interpolation=COLOURS)
        return pixels[part].copy()

    with source.cut(id) as cut:
        return np.stack(decoded(cut, rgb))


def decoded(cut: ClipPackets, convert: Callable[[Any], T]) -> list[T]:
    """What `convert` makes of the clip's frames, which are PyAV's.

    Raises:
        ValueError: some of them cannot be decoded.
    """
    context = cut.stream.codec_context
    if not context.is_open:
        context.thread_count = 1  # clips are decoded side by side
    wanted, found = set(cut.times), {}
    for packet in [*cut.packets, None]:  # None: no more will come
        if packet is not None:
            packet.pts = pts(packet)
        for frame in context.decode(packet):
            if frame.pts in wanted:
                found[frame.pts] = convert(frame)
        if len(found) == len(wanted):
            return [found[time] for time in cut.times]
    raise ValueError(f"{len(wanted) - len(found)} of {len(wanted)} frames cannot be decoded")
