"""The samples of video.py by PyAV and torch: the same frames, crops and flips, for the baseline loader.

Decoded frames are those of DALI on the CPU, bit for bit; resized ones differ as in classification_dali.py.
"""

import io
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import Interpolation
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.video import Clips
from raydali.data.video_clips import VideoClips
from raydali.data.video_packets import Cut

# FFmpeg's own default is to repeat the colours, which are coded at half the size.
COLOURS = int(Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND)


def clip_sample(settings: Clips, source: VideoClips, id: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Clips.sample`."""
    ids = np.array([id])
    crops = settings.crops(source, ids, np.array([epoch]))
    (height, width), (top, left) = crops.resized[0].tolist(), crops.starts[0].tolist()
    frames = torch.from_numpy(decoded(source.cut(id))).permute(0, 3, 1, 2)
    frames = F.interpolate(frames, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    frames = frames[:, :, top : top + settings.image_size, left : left + settings.image_size]
    if crops.flips[0]:
        frames = frames.flip(3)
    return frames.permute(1, 0, 2, 3).contiguous(), torch.tensor(int(source.labels(ids)[0]))


def decoded(cut: Cut) -> NDArray[np.uint8]:
    """The frames of a clip, (sequence_length, height, width, 3) RGB."""
    wanted = set(cut.frames.tolist())
    container: Any = av.open(io.BytesIO(cut.content.tobytes()))
    with container:
        frames = {}
        for place, frame in enumerate(container.decode(video=0)):
            if place in wanted:
                frames[place] = frame.to_ndarray(format="rgb24", interpolation=COLOURS)
            if len(frames) == len(wanted):
                break
    if missing := wanted - frames.keys():
        raise ValueError(f"{len(missing)} of {len(wanted)} frames cannot be decoded")
    return np.stack([frames[place] for place in cut.frames.tolist()])
