"""Reads a video with PyAV without decoding it: its number of frames, and the packets that a clip needs.

file      I--------I-----[--.--.--.]--I--------        [.]: the clip, I: keyframes
packets            I-----------------                  are decoded by data/video/task.py or nvdec.py
"""

import struct
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydali.data.read import storage
from raydali.data.read.storage import why_pointer

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

    Packet = av.Packet[VideoStream]

_NOT_SHOWN = 0x10
"""Bit in the first byte of a VP8 packet, unset if the frame is only a reference (RFC 6386, section 9.1)."""
_SLICES = range(1, 6)
"""Types of H.264's NAL units that are slices of a frame."""
_REORDERED = 16
"""Limit of frames that are decoded before a frame that is displayed before them, in any codec."""
_IN_ORDER = ("vp8", "vp9", "av1", "mjpeg")
_WITH_ORDER = ("mov,mp4,m4a,3gp,3g2,mj2", "mpegts")
_WITH_HEADER = ("mov,mp4,m4a,3gp,3g2,mj2",)
"""Containers with decoding times; Matroska has none, and FFmpeg estimates them from the packets."""


class Orientation(NamedTuple):
    """How players turn the frames, which telephones store as the sensor has them.

    It is one of EXIF's eight ways: a frame is transposed, then its rows and columns are reversed.
    """

    transposed: bool = False
    rows: bool = False
    columns: bool = False

    @property
    def reversed_axes(self) -> tuple[int, ...]:
        """The axes of (..., height, width, channels) to reverse."""
        return (-3,) * self.rows + (-2,) * self.columns


class Part(NamedTuple):
    """Rows and columns of a frame, with even limits: chroma is coded for two by two pixels."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class VideoInfo:
    """The index entry of a video.

    Attributes:
        frames: number of displayed frames, from the container's table or, without one, from all packets.
        height, width: coded size in pixels, before rotation, and without pixel aspect ratio.
        orientation: how the coded frames are turned to be upright.
        codec: FFmpeg's name of the codec.
        has_header: whether the container's header describes its streams completely, as in MP4 and MOV: opening it
            then takes a fifth of the time.
        key_frames: int64, ascending: the number of frames decoded before each keyframe.
        keyframe_pts: int64, the time to seek for each, in units of the stream's time base.
    """

    frames: int
    height: int
    width: int
    orientation: Orientation
    codec: str
    has_header: bool
    key_frames: NDArray[np.int64]
    keyframe_pts: NDArray[np.int64]


@dataclass(frozen=True)
class ClipPackets:
    """The packets of a clip, valid while the video is open.

    Attributes:
        stream: PyAV's stream, whose codec context can decode.
        packets: PyAV's packets from a keyframe on, in decoding order.
        times: presentation times of the clip's frames, in units of the stream's time base; the last one is repeated if
            the video is too short.
    """

    stream: "VideoStream"
    packets: list["Packet"]
    times: list[int]


def read_video_info(path: str) -> VideoInfo:
    """Read the index of a video.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.

    Raises:
        OSError: it is no video, has no frames, or ends before its last one; names the path.
    """
    with open_video(path) as (container, stream):
        entries = stream.index_entries
        if stream.frames and len(entries) == stream.frames:
            table = [(entry.timestamp, entry.is_keyframe, entry.is_discard) for entry in entries]
            end = max(entry.pos + entry.size for entry in entries)
            if end > container.size:
                raise ValueError(f"it ends after {container.size:,} of {end:,} bytes")
        else:
            packets = (packet for packet in container.demux(stream) if packet.size)
            table = [(_time(packet), packet.is_keyframe, not _counts(packet, stream)) for packet in packets]
        times, key, left_out = np.array(table, np.int64).reshape(-1, 3).T
        frames = int((left_out == 0).sum())
        context = stream.codec_context
        if not (frames and key.any() and context.height and context.width):
            raise ValueError("it has no frames")
        before = np.cumsum(left_out == 0) - (left_out == 0)
        is_key = key != 0
        return VideoInfo(
            frames=frames,
            height=context.height,
            width=context.width,
            orientation=read_orientation(stream),
            codec=context.codec.canonical_name,
            has_header=container.format.name in _WITH_HEADER,
            key_frames=before[is_key],
            keyframe_pts=times[is_key],
        )


def read_orientation(stream: "VideoStream") -> Orientation:
    """Return the orientation by the container's display matrix, rounded to a multiple of 90 degrees.

    PyAV has the matrix only with a decoded frame. To decode none, the header of a file with the same stream is made in
    memory, where the matrix has a known place (ISO/IEC 14496-12, 8.3.2).
    """
    import av

    for name in ("mp4", "mov"):  # MP4 holds AV1 and VP9, MOV ProRes; the other raises an error
        options = {"movflags": "empty_moov"}
        with suppress(ValueError, av.FFmpegError), av.open(made := BytesIO(), "w", name, options) as copy:
            copy.add_stream_from_template(stream, opaque=True)
            copy.start_encoding()
            header = made.getvalue()
            x_x, x_y, _, y_x, y_y = struct.unpack_from(">5i", header, header.index(b"tkhd") + 44)
            transposed = abs(x_y) + abs(y_x) > abs(x_x) + abs(y_y)
            return Orientation(True, x_y < 0, y_x < 0) if transposed else Orientation(False, y_y < 0, x_x < 0)
    return Orientation()


@contextmanager
def read_clip_packets(
    path: str, info: VideoInfo, first: int, stride: int, sequence_length: int
) -> Iterator[ClipPackets]:
    """Read the packets for frames first, first + stride, ..., beginning at the keyframe before them.

    Frames past the end of the video are its last one.

    Raises:
        OSError: the video cannot be read or decoded, or has changed since it was indexed; names the path.
    """
    wanted = np.minimum(first + stride * np.arange(sequence_length), info.frames - 1)
    with open_video(path, has_header=info.has_header) as (container, stream):
        key = bisect_right(info.key_frames.tolist(), first) - 1
        while True:
            before = int(info.key_frames[max(key, 0)])
            packets, shown = _packets(container, stream, info, max(key, 0), int(wanted[-1]) - before)
            # Frames decoded after a keyframe and displayed before it may refer to frames of the previous keyframe.
            leading = bisect_right(shown, pts(packets[0])) - 1
            if key <= 0 or first >= before + leading:
                break
            key -= 1
        if len(shown) <= wanted[-1] - before:
            raise ValueError(f"frame {wanted[-1]} of {info.frames} is missing: index the data again")
        times = [shown[frame - before] for frame in wanted.tolist()]
        begin = pts(packets[0])
        last = max(i for i, packet in enumerate(packets) if pts(packet) <= times[-1])
        clip = set(times)
        yield ClipPackets(
            stream, [packet for packet in packets[: last + 1] if _needed(packet, stream, begin, clip)], times
        )


@contextmanager
def open_video(path: str, *, has_header: bool = False) -> Iterator[tuple[Any, Any]]:
    """Open a video; yields PyAV's container and stream.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.
        has_header: see `VideoInfo`; no packet is probed.

    Raises:
        OSError: any error while it is open; names the path.
    """
    import av

    try:
        if path.startswith("/"):
            opened: Any = f"file:{path}"
        else:
            opened = storage.file_system(path).open_input_file(path.partition("://")[2])
        # Otherwise FFmpeg decodes a frame to configure decoders: 30 ms at 1080p.
        options = {"skip_frame": "all"} | ({"probesize": "32"} if has_header else {})
        with av.open(opened, options=options) as container:
            if not container.streams.video:
                raise ValueError("it has no video")
            yield container, container.streams.best("video")
    except (OSError, ValueError, av.FFmpegError) as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else error
        if isinstance(error, av.InvalidDataError) and path.startswith("/"):
            with Path(path).open("rb") as file:
                reason = why_pointer(file.read(64)) or reason
        raise OSError(f"{path} cannot be read: {' '.join(str(reason).split())}") from error


def _packets(
    container: "InputContainer", stream: "VideoStream", info: VideoInfo, key: int, last: int
) -> tuple[list["Packet"], list[int]]:
    """Read packets from a keyframe on until the `last`-th displayed frame is known.

    Returns them, and the sorted times of the displayed ones.
    """
    time = int(info.keyframe_pts[key])
    demuxed = _from(container, stream, time)
    packet = next(demuxed, None)
    if packet is None or not packet.is_keyframe or _time(packet) != time:  # a container that cannot seek
        demuxed = _from_start(container, stream, int(info.key_frames[key]))
        packet = next(demuxed, None)
    packets: list[Packet] = []
    shown: list[int] = []
    # With true decoding times, no later packet is displayed before them.
    tells_order = container.format.name in _WITH_ORDER or stream.codec_context.codec.canonical_name in _IN_ORDER
    while packet is not None:
        packets.append(packet)
        if _counts(packet, stream):
            insort(shown, pts(packet))
        if len(shown) > last and (
            packet.dts is not None and packet.dts >= shown[last] if tells_order else len(shown) > last + _REORDERED
        ):
            break
        packet = next(demuxed, None)
    if not packets:
        raise ValueError("it is shorter than its index says: index the data again")
    return packets, shown


def _from(container: "InputContainer", stream: "VideoStream", time: int) -> Iterator["Packet"]:
    """The packets from the time of a keyframe on; others if the container cannot seek."""
    import av

    def at(sought: int) -> Iterator["Packet"]:
        container.seek(sought, stream=stream)
        return (packet for packet in container.demux(stream) if packet.size)

    try:
        first = next(at(time), None)
        # MP4s with reordered frames are sought by presentation time, while keyframes are indexed by decoding time.
        sought = time if first is None or _time(first) >= time else time + pts(first) - _time(first)
        return dropwhile(lambda packet: _time(packet) < time, at(sought))
    except av.FFmpegError:
        return iter(())


def _from_start(container: "InputContainer", stream: "VideoStream", frames: int) -> Iterator["Packet"]:
    """The packets from the keyframe with this number of frames before it, found by reading from the start."""
    container.seek(0)
    for packet in container.demux(stream):
        if frames == 0 and packet.is_keyframe:
            frames = -1
        if frames < 0 and packet.size:
            yield packet
        elif packet.size:
            frames -= _counts(packet, stream)


def _needed(packet: "Packet", stream: "VideoStream", begin: int, clip: set[int]) -> bool:
    """Return whether decoding the clip's frames requires this packet.

    It does if it is in the clip, or a reference frame after the keyframe at `begin`.
    """
    time = pts(packet)
    return time >= begin and (time in clip or is_reference(packet, stream))


def is_reference(packet: "Packet", stream: "VideoStream") -> bool:
    """Return whether a packet may be a reference for other frames.

    False is certain, and known only for H.264 in MP4, MOV and Matroska: nal_ref_idc (ITU-T H.264, 7.4.1) is 0 in all
    its slices.
    """
    context = stream.codec_context
    header = context.extradata or b""
    if context.codec.canonical_name != "h264" or header[:1] != b"\1":
        return True
    content, at, size_bytes = memoryview(packet), 0, header[4] % 4 + 1
    while at + size_bytes < len(content):
        unit = content[at + size_bytes]
        if unit & 0x1F in _SLICES and unit & 0x60:
            return True
        at += size_bytes + int.from_bytes(content[at : at + size_bytes], "big")
    return False


def pts(packet: "Packet") -> int:
    """The presentation time of a packet's frame, in units of the stream's time base."""
    return int(packet.dts if packet.pts is None else packet.pts)  # type: ignore[arg-type]  # it has one


def _time(packet: "Packet") -> int:
    """The time by which containers are sought."""
    return int(packet.pts if packet.dts is None else packet.dts)  # type: ignore[arg-type]  # it has one


def _counts(packet: "Packet", stream: "VideoStream") -> bool:
    return not packet.is_discard and is_displayed(packet, stream)


def is_displayed(packet: "Packet", stream: "VideoStream") -> bool:
    """Return whether a packet's frame is displayed, and not only a reference."""
    return stream.codec_context.codec.canonical_name != "vp8" or bool(memoryview(packet)[0] & _NOT_SHOWN)
