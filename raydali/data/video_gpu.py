"""Clips for a GPU: decoded by its video engines, or by FFmpeg what these do not decode; then resized by DALI.

    ids --> packets --> decode --> luma and chroma of the crops --> DALI graph
            FFmpeg      engines    on the GPU, 1.5 bytes a pixel    resize, RGB, flip

Each thread has decoders of its own, which take clip after clip. An engine decodes one frame at a time, and a decoder
keeps one engine busy: so there are as many threads as engines, and some more, which read files meanwhile.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.pipeline import Device, Inputs, Pipeline
from raydali.data.video import Clips, Ids, Part
from raydali.data.video_clips import VideoClips
from raydali.data.video_nvdec import NvdecDecoder, decodable
from raydali.data.video_packets import Cut
from raydali.data.video_pyav import decoded

_NV12 = ("yuv420p", "yuvj420p", "nv12")
_BT601 = 0.299, 0.114
_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
"""Of red and blue in luma, by FFmpeg's number of the colour space; BT.601 where the video says nothing, as FFmpeg."""
_FULL_RANGE = 2


class Colours(NamedTuple):
    """How a video's pixels are coded: FFmpeg's names and numbers."""

    pixels: str
    space: int
    range: int


class ClipsOnGpu(Pipeline[VideoClips]):
    """`Clips` whose videos a GPU decodes.

    Args:
        clips: settings.
        device: a GPU.
        decoders: how many clips are decoded at once.
    """

    gpu_inputs = 2

    def __init__(self, clips: Clips, device: torch.device, decoders: int) -> None:
        self.clips, self.device = clips, device
        self._threads = ThreadPoolExecutor(decoders)
        self._own = threading.local()
        self._colours: dict[int, Colours] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Those of `clips`."""
        return self.clips.outputs

    def inputs(self, source: VideoClips, ids: Ids, epochs: Ids) -> Inputs:
        """Luma (sequence_length, height, width, 1) and chroma (sequence_length, height / 2, width / 2, 2) around the
        crop, uint8 on the GPU; starts and ends of crops (N, 2) float32; matrices (N, 3, 3) and offsets (N, 3), float32,
        to RGB; flips (N,) int32, labels (N,) int64.

        Raises:
            OSError: a video cannot be read or decoded; names its path.
        """
        crops = self.clips.crops(source, ids, epochs)
        regions = self.clips.regions(source, ids, crops)
        found = list(self._threads.map(partial(self._decode, source), ids.tolist(), regions.parts))
        luma, chroma, colours = zip(*found, strict=True)
        matrices, offsets = zip(*map(to_rgb, colours), strict=True)
        beside = regions.starts, regions.ends, np.stack(matrices), np.stack(offsets), crops.flips, source.labels(ids)
        return list(luma), list(chroma), *beside

    def graph(self, source: VideoClips, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Resizes with antialiasing what the crop shows and nothing beside it, flips."""
        from raydali.data.video_dali import planes_graph

        return planes_graph(self.clips, *inputs, device=device)

    def sample(self, source: VideoClips, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """That of `clips`, on the CPU."""
        return self.clips.sample(source, id, epoch)

    def close(self) -> None:
        """End the threads, and free the decoders with them."""
        self._threads.shutdown(cancel_futures=True)

    def _decode(self, source: VideoClips, id: int, part: Part) -> tuple[torch.Tensor, torch.Tensor, Colours]:
        (video,) = source.places(np.array([id]))[0].tolist()
        height, width = source.shapes[video].tolist()
        codec = str(source.codecs[video])
        with source.cut(id) as cut, self._stream():
            colours = self._colours.get(video)
            if colours is None:
                colours = self._colours[video] = colours_of(cut)
            planes = _Planes(part, source.sequence_length, self.device)
            if colours.pixels in _NV12 and decodable(self.device, codec, height, width):
                largest = source.shapes[source.codecs == codec].max(0).tolist()
                decoder = self._decoder(codec, largest)
                for place, frame in decoder.frames(cut, height, width):
                    planes.put(place, frame[:height], frame[height:])
            else:
                for place, (luma, chroma) in enumerate(decoded(cut, partial(nv12, colours=colours))):
                    planes.put(place, luma, chroma)
            torch.cuda.current_stream(self.device).synchronize()
            return planes.luma, planes.chroma, colours

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """The thread's own CUDA stream."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._own.stream):
            yield

    def _decoder(self, codec: str, largest: list[int]) -> NvdecDecoder:
        """The thread's own for this codec."""
        decoders = self._own.__dict__.setdefault("decoders", {})
        if codec not in decoders:
            decoders[codec] = NvdecDecoder(self.device, codec, *largest)
        decoder: NvdecDecoder = decoders[codec]
        return decoder


class _Planes:
    """A clip's luma and chroma, as far as they are kept."""

    def __init__(self, part: Part, frames: int, device: torch.device) -> None:
        self.part = part
        self.halves = Part(*(slice(side.start // 2, side.stop // 2) for side in part))
        height, width = (side.stop - side.start for side in part)
        self.luma = torch.empty((frames, height, width, 1), dtype=torch.uint8, device=device)
        self.chroma = torch.empty((frames, height // 2, width // 2, 2), dtype=torch.uint8, device=device)

    def put(self, place: int, luma: torch.Tensor, chroma: torch.Tensor) -> None:
        """A frame: luma (height, width) and chroma (height / 2, width)."""
        self.luma[place, :, :, 0].copy_(luma[self.part], non_blocking=True)
        self.chroma[place].copy_(chroma.unflatten(1, (-1, 2))[self.halves], non_blocking=True)


def colours_of(cut: Cut) -> Colours:
    """Where the container does not say, the first packet does."""
    context = cut.stream.codec_context
    if context.pix_fmt is None or context.codec.canonical_name == "h264":
        context.thread_count = 1
        context.decode(cut.packets[0])
        context.flush_buffers()
    return Colours(context.pix_fmt or "", int(context.colorspace), int(context.color_range))


def nv12(frame: Any, colours: Colours) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame of PyAV's as luma (height, width) and chroma (height / 2, width)."""
    whole = {"src_color_range": colours.range, "dst_color_range": colours.range} if colours.range else {}
    planes = frame.reformat(format="nv12", **whole).planes
    rows = (np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in planes)
    luma, chroma = (torch.from_numpy(plane[:, : frame.width // 2 * 2].copy()) for plane in rows)
    return luma, chroma


def to_rgb(colours: Colours) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(3, 3) and (3,): RGB = matrix @ (luma, blue, red) + offset, all in 0..255."""
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
