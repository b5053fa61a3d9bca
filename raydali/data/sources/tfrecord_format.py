"""TensorFlow's files of records, TFRecord: as data sets have them, and TensorBoard's events.

    length    uint64
    checksum  uint32, of the length
    data
    checksum  uint32, of the data

The checksum of the data is not checked: an image that changed shows when it is decoded.
"""

import struct
from collections.abc import Callable, Iterator
from itertools import count

from raydali.data.sources.storage import why_pointer

_HEADER, _FOOTER = 12, 4
"""Bytes before and after a record's data."""
_COMPRESSED = b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"
"""How files begin that gzip wrote, or zlib at any level."""

Span = tuple[int, int]
"""Begin and end in a file, in bytes."""


def records(read: Callable[[int, int], bytes], size: int) -> Iterator[Span]:
    """Yield where the data of each record is.

    Args:
        read: takes a position and a number of bytes.
        size: of the file, in bytes.

    Raises:
        ValueError: the file is damaged, cut off, compressed, or no TFRecord file.
    """
    position = 0
    for number in count():
        if position == size:
            return
        head = read(position, min(_HEADER, size - position))
        length = int.from_bytes(head[:8], "little")
        if len(head) == _HEADER and masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
            if position:
                raise ValueError(f"it is damaged in record {number}, at byte {position}: write it again")
            if head.startswith(_COMPRESSED):
                raise ValueError("it is compressed, which prevents random access: write it without compression")
            raise ValueError(why_pointer(head) or "it is not a TFRecord file: give only such files")
        end = position + _HEADER + length
        if len(head) < _HEADER or end + _FOOTER > size:
            raise ValueError(f"it is cut off in record {number}, at byte {position} of {size}: write it again")
        yield position + _HEADER, end
        position = end + _FOOTER


def as_record(data: bytes) -> bytes:
    """The data as a record, to be appended to a file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


_CRC32C = [_crc32c_of(byte) for byte in range(256)]


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, its bits rotated and a constant added.

    tensorboardX has the same function, but importing it imports torch and boto3, which takes seconds.
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
