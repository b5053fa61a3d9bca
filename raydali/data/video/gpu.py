"""Decoding of clips by a GPU's video engines, or by FFmpeg if the engines do not support a video.

    ids --> packets --> decode --> luma and chroma of the crops --> DALI graph
            FFmpeg      engines    on the GPU, 1.5 bytes a pixel    resize, RGB, flip

Each thread has its own decoders, which decode one clip after another. A decoder keeps one engine busy. There are more
threads than engines, so that some threads can read files meanwhile.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types

from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples, of_each
from raydali.data.video.clips import VideoClips
from raydali.data.video.nvdec import NvdecDecoder, decodable
from raydali.data.video.packets import ClipPackets, Orientation, Part
from raydali.data.video.task import Clips, Crops, Ids, decoded

if TYPE_CHECKING:
    from av import VideoFrame
    from nvidia.dali.data_node import DataNode

_MARGIN = 2
"""The margin around a crop that antialiasing needs, in pixels of the output."""
_NV12 = ("yuv420p", "yuvj420p", "nv12")
_BT601 = 0.299, 0.114
_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
"""Weights of red and blue in luma, by FFmpeg's number of the colour space. As in FFmpeg, BT.601 is the default."""
_FULL_RANGE = 2


class Colours(NamedTuple):
    """The colour coding of a video, by FFmpeg's names and numbers."""

    pixels: str
    space: int
    range: int


@dataclass(frozen=True)
class Regions:
    """The kept parts of the coded frames of n clips, and the crops' corners in them, upright: float32 (n, 2) each."""

    parts: list[Part]
    starts: NDArray[np.float32]
    ends: NDArray[np.float32]


class ClipsOnGpu(Pipeline[VideoClips]):
    """A pipeline of clips that a GPU decodes.

    Args:
        clips: the settings, and the crops and flips.
        device: a GPU.
        decoders: number of clips that are decoded at once.
    """

    gpu_inputs = 2
    inputs_are = "gpu decode"

    def __init__(self, clips: Clips, device: torch.device, decoders: int) -> None:
        self.clips, self.device = clips, device
        self._threads = ThreadPoolExecutor(decoders)
        self._own = threading.local()
        self._colours: dict[int, Colours] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of `clips`."""
        return self.clips.outputs

    def inputs(self, source: VideoClips, samples: Samples) -> Inputs:
        """Return the decoded frames around the crops, and their conversions to RGB.

        These are luma (sequence_length, height, width, 1) and chroma (sequence_length, height / 2, width / 2, 2), uint8
        on the GPU, upright; starts and ends of crops (N, 2) float32; matrices (N, 3, 3) and offsets (N, 3) float32 of
        the conversion to RGB; flips (N,) int32; labels (N,) int64.

        Raises:
            SampleErrors: a video cannot be read or decoded.
        """
        ids, crops = samples.ids, self.clips.crops(source, samples.ids, samples.keys)
        regions = kept_regions(source, ids, crops, self.clips.image_size)
        clips = of_each(partial(self._decode, source), ids.tolist(), regions.parts, map=self._threads.map)
        luma, chroma, colours = zip(*clips, strict=True)
        matrices, offsets = zip(*map(to_rgb, colours), strict=True)
        beside = regions.starts, regions.ends, np.stack(matrices), np.stack(offsets), crops.flips, source.labels(ids)
        return list(luma), list(chroma), *beside

    def graph(self, source: VideoClips, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Resize only the part that the crop shows, with antialiasing; convert it to RGB; flip it."""
        return planes_graph(self.clips.image_size, *inputs, device=device)

    def sample(self, source: VideoClips, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """Return the sample that `clips` makes on the CPU."""
        return self.clips.sample(source, id, epoch)

    def close(self) -> None:
        """End the threads and free their decoders."""
        self._threads.shutdown(cancel_futures=True)

    def _decode(self, source: VideoClips, id: int, part: Part) -> tuple[torch.Tensor, torch.Tensor, Colours]:
        (video,) = source.places(np.array([id]))[0].tolist()
        height, width = source.table.shapes[video].tolist()
        codec = str(source.table.codecs[video])
        with source.cut(id) as cut, self._stream():
            colours = self._colours.get(video)
            if colours is None:
                colours = self._colours[video] = colours_of(cut)
            planes = Planes(source.sequence_length, height, part, self.device)
            if colours.pixels in _NV12 and decodable(self.device, codec, height, width):
                for place, frame in self._decoder(codec, source.largest[codec]).frames(cut, height, width):
                    planes.put(place, frame)
            else:
                for place, frame in enumerate(decoded(cut, partial(nv12, colours=colours))):
                    planes.put(place, frame)
            luma, chroma = planes.parts(source.orientation(id))
            torch.cuda.current_stream(self.device).synchronize()
            return luma, chroma, colours

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Use this thread's own CUDA stream inside the context."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._own.stream):
            yield

    def _decoder(self, codec: str, largest: tuple[int, int]) -> NvdecDecoder:
        """Return this thread's decoder for a codec."""
        decoders = self._own.__dict__.setdefault("decoders", {})
        if codec not in decoders:
            decoders[codec] = NvdecDecoder(self.device, codec, *largest)
        decoder: NvdecDecoder = decoders[codec]
        return decoder


def kept_regions(source: VideoClips, ids: Ids, crops: Crops, side: int) -> Regions:
    """Return the parts of the decoded frames to keep: the crops with a margin."""
    videos = source.places(ids)[0]
    shapes, orientations = source.upright_shapes[videos], source.table.orientations[videos]
    transposed, flipped = orientations[:, :1], orientations[:, 1:]
    scale = shapes / crops.resized
    starts, ends = crops.starts * scale, (crops.starts + side) * scale
    starts, ends = np.where(flipped, shapes - ends, starts), np.where(flipped, shapes - starts, ends)
    margin = _MARGIN * np.ceil(np.maximum(scale, 1))
    whole = np.maximum(shapes // 2 * 2, 1)
    first = np.maximum(np.floor(starts - margin), 0).astype(np.int64) // 2 * 2
    last = np.minimum(np.ceil(ends + margin).astype(np.int64) // 2 * 2 + 2, whole)
    lows, highs = (np.where(transposed, bounds[:, ::-1], bounds).tolist() for bounds in (first, last))
    parts = [Part(*map(slice, low, high)) for low, high in zip(lows, highs, strict=True)]
    starts, ends = np.where(flipped, last - ends, starts - first), np.where(flipped, last - starts, ends - first)
    return Regions(parts, starts.astype(np.float32), ends.astype(np.float32))


class Planes:
    """The luma and chroma of a clip.

    Columns are cropped during the copy, rows afterwards: because of the GIL, only one copy per frame is fast enough.
    """

    def __init__(self, frames: int, height: int, part: Part, device: torch.device) -> None:
        self._part, self._height = part, height
        columns = part.columns.stop - part.columns.start
        rows = height + (height + 1) // 2
        self._frames = torch.empty((frames, rows, columns), dtype=torch.uint8, device=device)
        self._places = self._frames.unbind()

    def put(self, place: int, frame: torch.Tensor) -> None:
        """Copy a frame (height * 3 / 2, width), which has luma above chroma."""
        self._places[place].copy_(frame[:, self._part.columns], non_blocking=True)

    def parts(self, orientation: Orientation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept luma, (frames, height, width, 1), and chroma, (frames, height / 2, width / 2, 2), upright."""
        rows = self._part.rows
        luma = self._frames[:, rows, :, None]
        chroma = self._frames[:, self._height + rows.start // 2 : self._height + rows.stop // 2].unflatten(2, (-1, 2))
        if orientation.transposed:
            luma, chroma = luma.swapaxes(1, 2), chroma.swapaxes(1, 2)
        return luma.flip(orientation.reversed_axes).contiguous(), chroma.flip(orientation.reversed_axes).contiguous()


def planes_graph(side: int, *inputs: "DataNode", device: Device) -> tuple["DataNode", "DataNode"]:
    """Build the graph from luma (frames, height, width, 1) and chroma of half the size (..., 2) to RGB (side, side)."""
    luma, chroma, starts, ends, matrices, offsets, flips, labels = inputs
    size = [side] * 2
    luma, chroma = fn.reshape(luma, layout="FHWC"), fn.reshape(chroma, layout="FHWC")
    luma = fn.resize(luma, size=size, roi_start=starts, roi_end=ends, dtype=types.FLOAT)
    chroma = fn.resize(chroma, size=size, roi_start=starts / 2, roi_end=ends / 2, dtype=types.FLOAT)
    clips = fn.coord_transform(fn.cat(luma, chroma, axis=3), M=matrices, T=offsets)
    clips = fn.reshape(fn.cast(clips, dtype=types.UINT8), layout="FHWC")
    return fn.flip(clips, horizontal=flips), labels.gpu() if device == "gpu" else labels


def colours_of(cut: ClipPackets) -> Colours:
    """Return the colour coding of a clip, from its container or from its first packet."""
    context = cut.stream.codec_context
    if context.pix_fmt is None or context.codec.canonical_name == "h264":
        context.thread_count = 1
        context.decode(cut.packets[0])
        context.flush_buffers()
    return Colours(context.pix_fmt or "", int(context.colorspace), int(context.color_range))


def nv12(frame: "VideoFrame", colours: Colours) -> torch.Tensor:
    """Convert a frame of PyAV to luma above chroma: uint8 (height * 3 / 2, width); an odd width is reduced by one."""
    whole = {"src_color_range": colours.range, "dst_color_range": colours.range} if colours.range else {}
    planes = frame.reformat(format="nv12", **whole).planes
    # A plane is a buffer.
    rows = [np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in planes]  # type: ignore[call-overload]
    return torch.from_numpy(np.concatenate([plane[:, : frame.width // 2 * 2] for plane in rows]))


def to_rgb(colours: Colours) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a matrix (3, 3) and an offset (3,): RGB = matrix @ (luma, blue, red) + offset, all in 0..255."""
    red, blue = _WEIGHTS.get(colours.space, _BT601)
    full = colours.range == _FULL_RANGE or colours.pixels.startswith("yuvj")
    luma, chroma, black = (1.0, 1.0, 0.0) if full else (255 / 219, 255 / 224, 16.0)
    from_blue, from_red, green = 2 * chroma * (1 - blue), 2 * chroma * (1 - red), 1 - red - blue
    matrix = np.array(
        [
            [luma, 0, from_red],
            [luma, -from_blue * blue / green, -from_red * red / green],
            [luma, from_blue, 0],
        ]
    )
    return matrix.astype(np.float32), (-matrix @ np.array([black, 128, 128])).astype(np.float32)
