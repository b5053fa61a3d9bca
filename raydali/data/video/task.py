"""Video classification: all frames of a clip are resized, cropped and flipped in the same way.

    on a CPU    FFmpeg decodes, resizes and converts whole frames to RGB in one step --> upright, crop, flip
    on a GPU    the video engines decode, and DALI does the rest (gpu.py)

On both, the coded planes are resized, and only the pixels of the result become RGB. `fn.decoders.video` of DALI 2.4.0
is not used: it decodes a file from its first frame, and on a GPU it makes a decoder for each clip, which takes 0.1 s,
one at a time for all GPUs of a host.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import RandomFlips, centre
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples, of_each
from raydali.data.tasks.settings import ResizedImages
from raydali.data.video.clips import VideoClips
from raydali.data.video.packets import ClipPackets, pts

if TYPE_CHECKING:
    import torch
    from av import VideoFrame
    from nvidia.dali.data_node import DataNode

Ids = NDArray[np.int64]

T = TypeVar("T")

_DECODING_THREADS = 8


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


@dataclass(frozen=True, kw_only=True)
class Clips(Pipeline[VideoClips], ResizedImages):
    """The settings that training and validation clips share: frames are resized by their shorter side and cropped."""

    inputs_are = "cpu decode"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of clips (N, 3, sequence_length, image_size, image_size) uint8 RGB and labels (N,) int64."""
        return "clips", "labels"

    def inputs(self, source: VideoClips, samples: Samples) -> Inputs:
        """Return clips (sequence_length, image_size, image_size, 3) uint8 RGB, and labels (N,).

        Raises:
            SampleErrors: a video cannot be read or decoded.
        """
        clip = partial(self._clip, source, samples.ids, self.crops(source, samples.ids, samples.keys))
        with ThreadPoolExecutor(_DECODING_THREADS) as threads:
            return of_each(clip, range(len(samples.ids)), map=threads.map), source.labels(samples.ids)

    def graph(self, source: VideoClips, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Pass the clips on."""
        from nvidia.dali import fn

        clips, labels = (node.gpu() if device == "gpu" else node for node in inputs)
        return fn.reshape(clips, layout="FHWC"), labels

    def sample(self, source: VideoClips, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same: clip (3, sequence_length, image_size, image_size) uint8, label."""
        import torch

        ids = np.array([id])
        clip = self._clip(source, ids, self.crops(source, ids, np.array([epoch])), 0)
        return torch.from_numpy(clip).permute(3, 0, 1, 2), torch.tensor(int(source.labels(ids)[0]))

    def _clip(self, source: VideoClips, ids: Ids, crops: Crops, place: int) -> NDArray[np.uint8]:
        (height, width), (top, left) = crops.resized[place].tolist(), crops.starts[place].tolist()
        frames = rgb_clip(source, int(ids[place]), (height, width))
        clip = frames[:, top : top + self.image_size, left : left + self.image_size]
        return np.ascontiguousarray(clip[:, :, ::-1] if crops.flips[place] else clip)

    def crops(self, source: VideoClips, ids: Ids, keys: Ids) -> Crops:
        """Return the crops of these clips: the centre, not mirrored."""
        resized, starts = centre(source.upright_shapes[source.places(ids)[0]], self.shorter_side, self.image_size)
        return Crops(resized, starts, np.zeros(len(ids), np.int32))


@dataclass(frozen=True, kw_only=True)
class ValidationClips(Clips):
    """The centre of frames whose shorter side is resized."""


@dataclass(frozen=True, kw_only=True)
class TrainClips(RandomFlips, Clips):
    """A random crop and horizontal flip of such frames; they depend on (seed, epoch, id) only."""

    def crops(self, source: VideoClips, ids: Ids, keys: Ids) -> Crops:
        """Return the crops of these clips, the same for all frames of a clip."""
        flips, places = np.split(uniforms(3, self.seed, keys, ids), [1], axis=1)
        resized = super().crops(source, ids, keys).resized
        starts = np.floor(places * (resized - self.image_size + 1)).astype(np.int64)
        return Crops(resized, starts, self.flips(flips[:, 0]))


def rgb_clip(source: VideoClips, id: int, shape: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Return the frames of a clip, upright: (sequence_length, height, width, 3) uint8 RGB.

    Args:
        source: the clips.
        id: of the clip.
        shape: height and width to which FFmpeg resizes the upright frames, antialiased; None: they are not resized.

    Raises:
        OSError: the video cannot be read or decoded.
    """
    from av.video.reformatter import Interpolation

    # By default, FFmpeg repeats pixels of the colours, which are coded at half the size.
    colours = int(Interpolation.BILINEAR | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND)
    orientation = source.orientation(id)
    height, width = (None, None) if shape is None else shape[::-1] if orientation.transposed else shape

    def rgb(frame: "VideoFrame") -> NDArray[np.uint8]:
        resized = frame.reformat(width, height, "rgb24", interpolation=colours, threads=1)
        pixels = np.asarray(resized.to_ndarray(), np.uint8)
        return np.flip(pixels.swapaxes(0, int(orientation.transposed)), orientation.reversed_axes)

    with source.cut(id) as cut:
        return np.stack(decoded(cut, rgb))


def decoded(cut: ClipPackets, convert: Callable[["VideoFrame"], T]) -> list[T]:
    """Decode the frames of a clip by FFmpeg, and return the result of `convert` for each.

    Raises:
        ValueError: some frames cannot be decoded.
    """
    context = cut.stream.codec_context
    if not context.is_open:
        context.thread_count = 1  # several clips are decoded in parallel
    wanted, frames = set(cut.times), {}
    for packet in [*cut.packets, None]:  # None flushes the decoder
        if packet is not None:
            packet.pts = pts(packet)
        for frame in context.decode(packet):
            if frame.pts in wanted:
                frames[frame.pts] = convert(frame)
        if len(frames) == len(wanted):
            return [frames[time] for time in cut.times]
    raise ValueError(f"{len(wanted) - len(frames)} of {len(wanted)} frames cannot be decoded")
