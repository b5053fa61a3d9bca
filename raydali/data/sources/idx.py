"""Labelled grey images in IDX files, the format of MNIST: all of them are held in memory, as the index of the others.

    train-images-idx3-ubyte.gz     0 0 8 3, then count, height and width (4 bytes each, big-endian), then 8-bit pixels
    train-labels-idx1-ubyte.gz     0 0 8 1, then count, then a byte for each label

Source: http://yann.lecun.com/exdb/mnist. Fashion-MNIST, KMNIST and EMNIST have the same names.
"""

import gzip
import io
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.files import absolute, digest
from raydali.data.sources.listing import FoundFile, entries_or_none
from raydali.data.sources.shard_index import Member, Part, joined_index
from raydali.data.sources.shards import Shards
from raydali.data.sources.storage import why_pointer
from raydali.errors import UsageError

MOST_BYTES = 1 << 32
"""Maximum size of the pixels of a file: the driver and each node hold them in memory."""
_NAME = re.compile(r"((?:.*-)?([^-]+))-images[-.]idx3-ubyte(?:\.gz)?$")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class IdxImages(Shards):
    """N grey images of one size by id 0..N-1, in the order of the file; the name of one is its number. Made by `scan`.

    Attributes:
        offsets: int64 (N,), numbers of the images in the file, from 0.
        pixels: uint8 (M, height, width), those of all images in the file.
    """

    pixels: Bytes = field(kw_only=True)

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None, *, labeled: bool = True) -> Self:
        """Read a file of images and the file of their labels beside it.

        Classes are the labels that occur, sorted. Warns if they are not contiguous from 0.

        Args:
            data: the file of images, perhaps compressed; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation those of the training set. Default: any.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: a file is missing, is cut off, is no such IDX file, or has other counts than it says or than
                its counterpart; the pixels exceed MOST_BYTES. A label is not among the classes.
        """
        path = absolute(data)
        pixels = _read(path, 3)
        count = len(pixels)
        values = np.zeros(count, np.uint8) if not labeled else _read(_labels_file(path), 1)
        if len(values) != count:
            raise UsageError(f"{_labels_file(path)} has {len(values)} labels for {count} images: give its own")
        images = [Member(b"%d" % number, number, pixels[0].size) for number in range(count)]
        index = joined_index(path, [Part.of(images, values.tolist())], needed="images")
        root, _, name = path.rpartition("/")
        return cls.of_index(data, root, [FoundFile(name, pixels.size)], index, classes, pixels=pixels)

    def __str__(self) -> str:
        """For messages: the file."""
        return f"{self.root}/{self.shards[0]}"

    def files(self, ids: NDArray[np.int64]) -> list[Bytes]:
        """These images as PGM files, uint8 each."""
        header = np.frombuffer(b"P5\n%d %d\n255\n" % self.pixels.shape[:0:-1], np.uint8)
        rows = np.empty((len(ids), len(header) + self.pixels[0].size), np.uint8)
        rows[:, : len(header)] = header
        rows[:, len(header) :] = self.pixels[self.offsets[ids]].reshape(len(ids), -1)
        return list(rows)

    def _content(self, id: int) -> bytes:
        return self.files(np.array([id]))[0].tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of pixels, labels and classes, 32 hex digits; names are not part of it."""
        pixels, classes = self.pixels[self.offsets], os.fsencode("\0".join(self.classes))
        return digest(pixels.data, self.labels.astype("<i8").data, classes)


def names_idx(data: str) -> bool:
    """Return whether this is the name of an IDX file of images, and not an existing folder."""
    return bool(_NAME.search(data)) and not os.path.isdir(os.path.expanduser(data))


def idx_folder(folder: str) -> dict[str, str]:
    """Find the IDX files of images in a folder.

    Args:
        folder: local, or an `s3://` or `gs://` URI.

    Returns:
        The file of each split, by the word before `-images`, such as `train` or `t10k`; by the whole name before it
        where several have the same word. Of a file and its compressed copy, the file.
    """
    names = sorted(file.name for file in entries_or_none(folder) if not file.is_folder)
    found = {match[1]: match for match in map(_NAME.match, reversed(names)) if match}
    words = [match[2] for match in found.values()]
    place = folder.rstrip("/")
    return {key if words.count(match[2]) > 1 else match[2]: f"{place}/{match[0]}" for key, match in found.items()}


def _labels_file(images: str) -> str:
    folder, slash, name = images.rpartition("/")
    return folder + slash + name.replace("-images", "-labels").replace("idx3", "idx1")


def _read(path: str, dimensions: int) -> Bytes:
    """Return the array in an IDX file of bytes."""
    try:
        raw = storage.read(path)
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {storage.reason(error)}"
        raise UsageError(f"{path} {why}: give a folder with IDX files of images and of labels") from error
    if pointer := why_pointer(raw):
        raise UsageError(f"{path}: {pointer}")
    file = gzip.GzipFile(fileobj=io.BytesIO(raw)) if raw.startswith(b"\x1f\x8b") else io.BytesIO(raw)
    try:
        head, magic = file.read(4 + 4 * dimensions), bytes((0, 0, 8, dimensions))
        if head[:4] != magic:
            raise UsageError(f"{path} begins with 0x{head[:4].hex()}, not 0x{magic.hex()}: give an IDX file of bytes")
        shape = tuple(np.frombuffer(head[4:].ljust(4 * dimensions, b"\0"), ">u4").tolist())
        size = int(np.prod(shape, dtype=np.float64))
        if not 0 < size <= MOST_BYTES:
            raise UsageError(
                f"{path} says that it has {shape} bytes: give one of 1 to {MOST_BYTES} bytes, or PNG files"
            )
        data = file.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is damaged or cut off ({error}): copy it again") from error
    if len(data) != size:
        has = "more" if len(data) > size else f"{len(data)}"
        raise UsageError(f"{path} has {has} bytes after its header, not the {size} of {shape}: copy it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
