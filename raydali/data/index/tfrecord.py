"""Labelled images in TFRecord files: their index is read once, without the images, and cached.

    length    uint64
    checksum  uint32, of the length
    data
    checksum  uint32, of the data

The checksum of the data is not checked: an image that changed shows when it is decoded. The data of a record is a
tf.train.Example in protobuf, a map of features. The image's file and its class are under the first of these names that
exist:

    image/encoded      image/class/label    TensorFlow's models; ImageNet's labels begin at 1 there
    image              label                TensorFlow Datasets

TensorBoard's events are TFRecord files with other data.
"""

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar, Self

from raydali.data.index.listing import find_files
from raydali.data.index.shard_index import Label, Member, Part, shard_index
from raydali.data.index.shards import Shards
from raydali.data.read.file_parts import Read, read_ahead
from raydali.data.read.storage import why_pointer
from raydali.text import summarize

_HEADER, _FOOTER = 12, 4
"""Bytes before and after a record's data."""
_COMPRESSED = b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"
"""How files begin that gzip wrote, or zlib at any level."""

Span = tuple[int, int]
"""Begin and end in a file, in bytes."""

IMAGES = b"image/encoded", b"image"
LABELS = b"image/class/label", b"label"

_REMEDY = (
    "an Example needs one bytes value 'image/encoded' or 'image', and one int64 'image/class/label' or 'label' from 0"
)

# Tags of protobuf: a field's number and wire type.
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FEATURES = _FEATURE = _KEY = _BYTES_LIST = _VALUE = 1 << 3 | _DELIMITED
_OF_KEY = 2 << 3 | _DELIMITED
_INT64_LIST = 3 << 3 | _DELIMITED
_ONE_VALUE = 1 << 3 | _VARINT
_KINDS = {_BYTES_LIST: "bytes", 2 << 3 | _DELIMITED: "float", _INT64_LIST: "int64"}
_MAX_DIGITS = 10  # bytes of a varint

# Beginnings of the map entries to parse: one of the names, or a value before its name.
_WANTED = *(bytes([_KEY, len(name)]) + name for name in (*IMAGES, *LABELS)), bytes([_OF_KEY])
_LONGEST = max(map(len, _WANTED))


def _part(path: str, size: int, *, labeled: bool = True) -> Part:
    """Index the images of a file. Raises ValueError for a broken one."""
    images, labels, read = list[Member](), list[Label](), read_ahead(path, size)
    for number, (begin, end) in enumerate(records(read, size)):
        try:
            (at, behind), label = _image_and_label(read, begin, end, labeled)
        except ValueError as error:
            raise ValueError(f"record {number} {error}") from error
        images.append(Member(b"%d" % number, at, behind - at))
        labels.append(label)
    return Part.of(images, labels)


# ----------------------------------------------------------------------------------------------------------------------
# Records


def records(read: Read, size: int) -> Iterator[Span]:
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


# ----------------------------------------------------------------------------------------------------------------------
# Examples


def _image_and_label(read: Read, begin: int, end: int, labeled: bool = True) -> tuple[Span, int]:
    features = _features(read, begin, end, _WANTED)
    image, label = (next((name for name in names if name in features), None) for names in (IMAGES, LABELS))
    if image is None or (label is None and labeled):
        names = [name.decode("utf-8", "replace") for name in sorted(_features(read, begin, end))]
        there = f"its features are {summarize(names, limit=8, show=repr)}" if names else "it has no features"
        raise ValueError(f"has no {'image' if image is None else 'label'}, {there}: {_REMEDY}")
    files = [(at, behind) for tag, at, behind in _values(read, image, features[image], _BYTES_LIST) if tag == _VALUE]
    _require_one(image, files)
    if label is None or not labeled:
        return files[0], 0
    numbers: list[int] = []
    for tag, at, behind in _values(read, label, features[label], _INT64_LIST):
        if tag in (_ONE_VALUE, _VALUE):  # the latter is packed: any number of them
            numbers += _integers(read(at, behind - at))
    _require_one(label, numbers)
    if numbers[0] < 0:
        raise ValueError(f"has {numbers[0]} under {label.decode()!r}: {_REMEDY}")
    return files[0], numbers[0]


def _require_one(name: bytes, values: Sequence[object]) -> None:
    if len(values) != 1:
        raise ValueError(f"has {len(values)} values under {name.decode()!r}: {_REMEDY}")


def _features(read: Read, begin: int, end: int, wanted: tuple[bytes, ...] = (b"",)) -> dict[bytes, Span]:
    """The positions of the values of features whose entries begin so, by name."""
    return dict(
        _named(read, at, behind)
        for tag, at, behind in _fields(read, begin, end)
        if tag == _FEATURES
        for entry, at, behind in _fields(read, at, behind)
        if entry == _FEATURE and read(at, min(_LONGEST, behind - at)).startswith(wanted)
    )


def _named(read: Read, begin: int, end: int) -> tuple[bytes, Span]:
    """A feature's name, and the position of its values."""
    name, value = b"", (end, end)
    for tag, at, behind in _fields(read, begin, end):
        if tag == _KEY:
            name = read(at, behind - at)
        elif tag == _OF_KEY:
            value = at, behind
    return name, value


def _values(read: Read, name: bytes, feature: Span, kind: int) -> Iterator[tuple[int, int, int]]:
    lists = [field for field in _fields(read, *feature) if field[0] in _KINDS]
    if others := [tag for tag, _, _ in lists if tag != kind]:
        raise ValueError(f"has {_KINDS[others[0]]} under {name.decode()!r}, not {_KINDS[kind]}: {_REMEDY}")
    for _, at, behind in lists:
        yield from _fields(read, at, behind)


def _fields(read: Read, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a protobuf message: the tag of each, and the position of its value."""
    while begin < end:
        head = read(begin, min(2 * _MAX_DIGITS, end - begin))
        tag, used = _varint(head, 0)
        how = tag & 7
        if how == _DELIMITED:
            length, used = _varint(head, used)
        elif how == _VARINT:
            length = _varint(head, used)[1] - used
        elif how in (_FIXED64, _FIXED32):
            length = 8 if how == _FIXED64 else 4
        else:
            raise ValueError(f"is not a tf.train.Example: {_REMEDY}")
        begin += used
        if begin + length > end:
            raise ValueError(f"is not a tf.train.Example: {_REMEDY}")
        yield tag, begin, begin + length
        begin += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and the position after it."""
    number = shift = 0
    for byte in data[at : at + _MAX_DIGITS]:
        at += 1
        if byte < 0x80:
            return number | byte << shift, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise ValueError(f"is not a tf.train.Example: {_REMEDY}")


def _integers(data: bytes) -> list[int]:
    """Parse int64 values, packed or single."""
    numbers, at = [], 0
    while at < len(data):
        number, at = _varint(data, at)
        numbers.append(number - (1 << 64) if number >> 63 else number)
    return numbers


_NAME = re.compile(r"\.tfrec|-of-[\d*?{},.\[\]!-]+$")


@dataclass(frozen=True, eq=False)
class TFRecords(Shards):
    """N images in S TFRecord files, by id 0..N-1; the name of one is its number in its file, from 0. Made by `scan`."""

    first_labels: ClassVar[tuple[int, ...]] = (0, 1)

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None, *, labeled: bool = True) -> Self:
        """Index the images of some files, see `Shards.of_index`. The labels 1 to 1000 of ImageNet become 0 to 999.

        Args:
            data: a file or a pattern such as `train-*-of-01024` or `train-{00..99}.tfrecord`, where * matches only
                names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation the labels of the training set. Default: any.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: files that are missing, cut off, damaged, compressed, or no TFRecord files; records without an
                image or a label; no records. Names the first of them. A label is not among the classes.
        """
        root, files = find_files(data)
        kind = "tfrecord" if labeled else "tfrecord-unlabeled"
        index = shard_index(root, files, partial(_part, labeled=labeled), kind=kind, needed="records")
        return cls.of_index(data, root, files, index, classes)


def names_tfrecords(data: str) -> bool:
    """Return whether this is the name or the pattern of TFRecord files, and not an existing folder."""
    return bool(_NAME.search(data.rpartition("/")[2])) and not os.path.isdir(os.path.expanduser(data))
