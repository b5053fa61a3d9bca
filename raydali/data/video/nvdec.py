"""Decodes videos on a GPU's video engines through NVIDIA's PyNvVideoCodec, with decoders that are reused.

Making a decoder takes 50 to 100 ms, one at a time on a host; reusing it for the next clip takes no time.
"""

import logging
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from raydali.data.video.packets import ClipPackets, is_displayed, pts

if TYPE_CHECKING:
    from PyNvVideoCodec import PyNvDecoder

_log = logging.getLogger(__name__)

_CODECS = {"h264": "H264", "hevc": "HEVC", "av1": "AV1", "vp8": "VP8", "vp9": "VP9", "mpeg4": "MPEG4"}
"""FFmpeg's names of codecs, and NVIDIA's."""
_FILTERS = {
    "h264": "h264_mp4toannexb,dump_extra=freq=keyframe",
    "hevc": "hevc_mp4toannexb,dump_extra=freq=keyframe",
    "av1": "dump_extra=freq=keyframe",
    "mpeg4": "dump_extra=freq=keyframe",
}
"""FFmpeg's filters that make packets decodable without the file's header."""
_NEVER_REORDERED = ("vp8", "vp9")
"""Codecs whose hidden frames take the next frame's time, but whose frames come out in the order of packets."""


class NvdecDecoder:
    """Decodes clips of one codec on a GPU, for one thread, on the CUDA stream that was current when it was made.

    Args:
        device: the GPU.
        codec: FFmpeg's name of a `decodable` codec.
        max_height, max_width: maximum over all videos, pixels.
    """

    def __init__(self, device: torch.device, codec: str, max_height: int, max_width: int) -> None:
        self.device, self.codec = device, codec
        self._largest = max_height, max_width
        self._decoder: Any = None
        self._shape = 0, 0

    def frames(self, cut: ClipPackets, height: int, width: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the clip's frames: index in the clip, and uint8 (height * 3 / 2, width) on the GPU, luma above chroma.

        A frame is valid until the next one is requested and the work queued by then is done.

        Raises:
            ValueError: some of them cannot be decoded.
        """
        shown = [pts(packet) for packet in cut.packets if is_displayed(packet, cut.stream)]
        packets = filtered(cut, self.codec)
        # Reused only after a clip was decoded to its end: else it would mix the clip's frames with the next one's.
        decoder, self._decoder = self._decoder, None
        if decoder is None:
            decoder = _new_decoder(self.device, self.codec, *self._largest)
        elif self._shape != (height, width):
            decoder.setReconfigParams(width, height)
        try:
            yield from self._wanted(_decode(decoder, packets), shown, cut.times, height, width)
        except _OtherShapeError:  # of the video before
            decoder = _new_decoder(self.device, self.codec, *self._largest)
            yield from self._wanted(_decode(decoder, packets), shown, cut.times, height, width)
        self._decoder, self._shape = decoder, (height, width)

    def _wanted(
        self, frames: Iterator[Any], shown: list[int], times: list[int], height: int, width: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        places: dict[int, list[int]] = {}
        for place, time in enumerate(times):
            places.setdefault(time, []).append(place)
        for number, decoded in enumerate(frames):
            time = shown[number] if self.codec in _NEVER_REORDERED else decoded.getPTS()
            if time not in places:
                continue
            frame = from_dlpack(decoded)
            if frame.shape != (height * 3 // 2, width):
                raise _OtherShapeError(f"its frames are {tuple(frame.shape)} and not {(height * 3 // 2, width)}")
            for place in places.pop(time):
                yield place, frame
        if places:
            raise ValueError(f"{len(places)} of {len(set(times))} frames cannot be decoded")


class _OtherShapeError(ValueError):
    """Frames have another shape than in the index."""


def _decode(decoder: "PyNvDecoder", packets: list[tuple[bytes, int]]) -> Iterator[Any]:
    import PyNvVideoCodec as nvc

    for content, time in packets:
        data = np.frombuffer(content, np.uint8)
        packet = nvc.PacketData()
        packet.bsl_data, packet.bsl = data.ctypes.data, len(data)
        packet.pts = packet.dts = time
        yield from decoder.Decode(packet)
    packet = nvc.PacketData()
    packet.decode_flag = int(nvc.VideoPacketFlag.ENDOFSTREAM)
    yield from decoder.Decode(packet)


def _new_decoder(device: torch.device, codec: str, max_height: int, max_width: int) -> "PyNvDecoder":
    import PyNvVideoCodec as nvc

    return nvc.CreateDecoder(
        gpuid=device.index or 0,
        codec=getattr(nvc.cudaVideoCodec, _CODECS[codec]),
        cudacontext=_context(),
        cudastream=torch.cuda.current_stream(device).cuda_stream,
        usedevicememory=True,
        maxwidth=max_width,
        maxheight=max_height,
        outputColorType=nvc.OutputColorType.NATIVE,
    )


def filtered(cut: ClipPackets, codec: str) -> list[tuple[bytes, int]]:
    """The packets in the form that video engines take, without the file's header, and their presentation times.

    The filters leave the original packets empty.
    """
    import av

    if codec not in _FILTERS:
        return [(bytes(packet), pts(packet)) for packet in cut.packets]
    filters = av.BitStreamFilterContext(_FILTERS[codec], cut.stream)
    timed = [(packet, pts(packet)) for packet in cut.packets]
    return [(bytes(output), time) for packet, time in timed for output in filters.filter(packet)]


@cache
def decodable(device: torch.device, codec: str, height: int, width: int) -> bool:
    """Return whether a GPU's engines decode such videos, with 8 bits and 4:2:0 chroma."""
    facts = capabilities(device, codec)
    return bool(
        facts.get("supported")
        and facts["height_min"] <= height <= facts["height_max"]
        and facts["width_min"] <= width <= facts["width_max"]
        and height % 2 == width % 2 == 0
    )


@cache
def capabilities(device: torch.device, codec: str) -> dict[str, int]:
    """The capabilities of a GPU's engines for a codec by FFmpeg's name: supported, num_decoder_engines, height_min, ...

    Empty if they are unknown.
    """
    if codec not in _CODECS or (nvc := _library()) is None:
        return {}
    features: dict[str, int] = nvc.GetDecoderCaps(
        gpuid=device.index or 0, codec=getattr(nvc.cudaVideoCodec, _CODECS[codec])
    )
    return features


@cache
def _library() -> ModuleType | None:
    """PyNvVideoCodec, or None if it is not installed or the driver lacks what it needs."""
    try:
        import PyNvVideoCodec as nvc
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        _log.warning("this GPU's video engines cannot be used, so FFmpeg decodes on the CPU: %s", reason)
        return None
    library: ModuleType = nvc
    return library


def _context() -> int:
    """The CUDA context that torch uses on the current device."""
    import ctypes

    torch.cuda.current_stream().synchronize()  # creates the context
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0
