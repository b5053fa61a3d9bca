"""The orientation of a video: telephones store frames as the sensor has them, and how players turn them."""

import struct
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from av.video.stream import VideoStream


class Orientation(NamedTuple):
    """What makes a frame upright, one of EXIF's eight ways: it is transposed, then its rows and columns reversed."""

    transposed: bool = False
    rows: bool = False
    columns: bool = False

    @property
    def reversed_axes(self) -> tuple[int, ...]:
        """The axes of (..., height, width, channels) to reverse."""
        return (-3,) * self.rows + (-2,) * self.columns


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
