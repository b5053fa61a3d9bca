"""Video classification: all frames of a clip are resized, cropped and flipped in the same way.

    RGB clips --> resize the crop --> flip
    starts, ends --------^       flips ^

Clips are decoded before they enter the DALI graph, by FFmpeg (video_pyav.py), or by a GPU's video engines
(video_gpu.py), and turned upright. `fn.decoders.video` of DALI 2.4.0 is not used: it decodes a file from its first
frame, and on a GPU it makes a decoder for each clip, which takes 0.1 s, one at a time for all GPUs of a host.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.video.clips import VideoClips
from raydali.data.sources.video.packets import Part
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.data.tasks.settings import default_resize_size, require, require_draws, require_resize

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode

Ids = NDArray[np.int64]

_DECODING_THREADS = 8
_MARGIN = 2
"""The margin around a crop that antialiasing needs, in pixels of the output."""
_FLIP, _TOP, _LEFT = range(3)


@dataclass(frozen=True)
class Crops:
    """The crops of n clips, in resized frames.

    Attributes:
        resized: int64 (n, 2), height and width of the whole resized frames.
        starts: int64 (n, 2), y before x.
        flips: int32 (n,), 1 if the clip is mirrored, otherwise 0.
    """

    resized: NDArray[np.int64]
    starts: NDArray[np.int64]
    flips: NDArray[np.int32]


@dataclass(frozen=True)
class Regions:
    """The kept parts of the coded frames of n clips, and the crops' corners in them, upright: float32 (n, 2) each."""

    parts: list[Part]
    starts: NDArray[np.float32]
    ends: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Clips(Pipeline[VideoClips]):
    """The settings that training and validation clips share: frames are resized by their shorter side and cropped.

    Args:
        image_size: height and width of the output, in pixels.
        resize_size: length of the resized shorter side, at least image_size. None: 8/7 of image_size, like 128 for 112.

    Raises:
        UsageError: a value is out of its range.
    """

    inputs_are = "cpu decode"

    image_size: int
    resize_size: int | None = None

    def __post_init__(self) -> None:
        require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")
        require_resize(self.shorter_side, self.image_size)

    @property
    def shorter_side(self) -> int:
        """The length of the resized shorter side, in pixels."""
        return default_resize_size(self.image_size) if self.resize_size is None else self.resize_size

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of clips (N, 3, sequence_length, image_size, image_size) uint8 RGB and labels (N,) int64."""
        return "clips", "labels"

    def inputs(self, source: VideoClips, ids: Ids, epochs: Ids) -> Inputs:
        """Return decoded clips, the crops in them, flips and labels.

        Clips are (sequence_length, height, width, 3) uint8 RGB, upright, and contain only the part around the crop.
        Starts and ends of the crops in them are (N, 2) float32, flips (N,) int32, labels (N,) int64.

        Raises:
            OSError: a video cannot be read or decoded.
        """
        from raydali.data.tasks.video_pyav import rgb_clip

        crops = self.crops(source, ids, epochs)
        regions = self.regions(source, ids, crops)
        with ThreadPoolExecutor(_DECODING_THREADS) as threads:
            clips = list(threads.map(partial(rgb_clip, source), ids.tolist(), regions.parts))
        return clips, regions.starts, regions.ends, crops.flips, source.labels(ids)

    def graph(self, source: VideoClips, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Resize only the part that the crop shows, with antialiasing, and flip it."""
        from nvidia.dali import fn

        clips, starts, ends, flips, labels = inputs
        clips = fn.reshape(clips.gpu() if device == "gpu" else clips, layout="FHWC")
        clips = fn.resize(clips, size=[self.image_size] * 2, roi_start=starts, roi_end=ends)
        return fn.flip(clips, horizontal=flips), labels.gpu() if device == "gpu" else labels

    def sample(self, source: VideoClips, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same, made by PyAV and torch: clip (3, sequence_length, image_size, image_size) uint8, label.

        Decoded frames are identical to those of the graph on the CPU; resized ones differ as in classification.py.
        """
        import torch
        from torch.nn import functional as F

        from raydali.data.tasks.video_pyav import rgb_clip

        ids = np.array([id])
        crops = self.crops(source, ids, np.array([epoch]))
        shape, (top, left) = crops.resized[0].tolist(), crops.starts[0].tolist()
        frames = torch.from_numpy(rgb_clip(source, id)).permute(0, 3, 1, 2)
        frames = F.interpolate(frames, size=shape, mode="bilinear", antialias=True, align_corners=False)
        frames = frames[:, :, top : top + self.image_size, left : left + self.image_size]
        if crops.flips[0]:
            frames = frames.flip(3)
        return frames.permute(1, 0, 2, 3).contiguous(), torch.tensor(int(source.labels(ids)[0]))

    def regions(self, source: VideoClips, ids: Ids, crops: Crops) -> Regions:
        """Return the parts of the decoded frames to keep: the crops with a margin."""
        videos = source.places(ids)[0]
        shapes, orientations = source.upright_shapes[videos], source.orientations[videos]
        transposed, flipped = orientations[:, :1], orientations[:, 1:]
        scale = shapes / crops.resized
        starts, ends = crops.starts * scale, (crops.starts + self.image_size) * scale
        starts, ends = np.where(flipped, shapes - ends, starts), np.where(flipped, shapes - starts, ends)
        margin = _MARGIN * np.ceil(np.maximum(scale, 1))
        whole = np.maximum(shapes // 2 * 2, 1)
        first = np.maximum(np.floor(starts - margin), 0).astype(np.int64) // 2 * 2
        last = np.minimum(np.ceil(ends + margin).astype(np.int64) // 2 * 2 + 2, whole)
        lows, highs = (np.where(transposed, each[:, ::-1], each).tolist() for each in (first, last))
        parts = [Part(*map(slice, low, high)) for low, high in zip(lows, highs, strict=True)]
        starts, ends = np.where(flipped, last - ends, starts - first), np.where(flipped, last - starts, ends - first)
        return Regions(parts, starts.astype(np.float32), ends.astype(np.float32))

    def crops(self, source: VideoClips, ids: Ids, epochs: Ids) -> Crops:
        """Return the crops of these clips: the centre, not mirrored."""
        resized = self._resized(source, ids)
        starts = np.rint((resized - self.image_size) / 2).astype(np.int64)
        return Crops(resized, starts, np.zeros(len(ids), np.int32))

    def _resized(self, source: VideoClips, ids: Ids) -> NDArray[np.int64]:
        shapes = source.upright_shapes[source.places(ids)[0]]
        resized: NDArray[np.int64] = self.shorter_side * shapes // shapes.min(1, keepdims=True)
        return resized


@dataclass(frozen=True, kw_only=True)
class ValidationClips(Clips):
    """The centre of frames whose shorter side is resized."""


@dataclass(frozen=True, kw_only=True)
class TrainClips(Clips):
    """A random crop and flip of frames whose shorter side is resized; they depend on (seed, epoch, id) only.

    Args:
        seed: seed of the random numbers, 0 or more.
        flip_probability: probability of a horizontal flip.
    """

    seed: int
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        """Check that values are in their ranges."""
        super().__post_init__()
        require_draws(self.seed, flip_probability=self.flip_probability)

    def crops(self, source: VideoClips, ids: Ids, epochs: Ids) -> Crops:
        """Return the crops of these clips, the same for all frames of a clip."""
        numbers = uniforms(3, self.seed, epochs, ids)
        resized = self._resized(source, ids)
        starts = np.floor(numbers[:, _TOP:] * (resized - self.image_size + 1)).astype(np.int64)
        return Crops(resized, starts, (numbers[:, _FLIP] < self.flip_probability).astype(np.int32))
