"""The index of the images in a data set's shards, with their labels: each shard is read once, and the index is cached.

tar.py, tfrecord.py and parquet.py define the samples of a shard.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.cache import cache_arrays, cached_arrays
from raydali.data.index.files import digest
from raydali.data.index.listing import FoundFile
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import plural, summarize

_VERSION = b"3"  # another one for another content of the cached file
_THREADS = 32
_LINE_SECONDS = 10.0

Label = int | str


class Member(NamedTuple):
    """A file in a shard: its name, and the position of its bytes."""

    name: bytes
    offset: int
    length: int


class Part(NamedTuple):
    """The n images of a shard, by position, and their labels, in few bytes per sample: there may be ten million."""

    names: bytes
    positions: NDArray[np.int64]
    labels: list[Label]
    skipped: Mapping[str, int]
    unread: int

    @classmethod
    def of(
        cls, images: Sequence[Member], labels: list[Label], skipped: Mapping[str, int] | None = None, unread: int = 0
    ) -> "Part":
        """Pack some images.

        Args:
            images: in the order of their positions.
            labels: of each.
            skipped: the number of other files that could be samples but are not read, by kind.
            unread: the number of bytes after the shard's end.
        """
        same: dict[Label, Label] = {}
        positions = np.array([image[1:] for image in images], np.int64).reshape(-1, 2)
        names = b"".join(image.name + b"\0" for image in images)
        return cls(names, positions, [same.setdefault(label, label) for label in labels], skipped or {}, unread)


@dataclass(frozen=True)
class ShardIndex:
    """The N samples of S shards, by shard, then by position.

    Attributes:
        counts: int64 (S,), the samples of each shard.
        names: uint8, names of the images in their shards, each ended by a NUL.
        offsets, lengths: int64 (N,), the position of an image in its shard, in bytes.
        labels: int64 (N,), indices into the names of labels.
        label_names: uint8, joined by NUL; sorted, numbers by value.
        numbered: bool (), whether the labels are numbers.
        skipped: uint8, the number of other files that could be samples but are not read, by kind, as JSON.
        unread: int64 (), bytes after the ends of shards.
    """

    counts: NDArray[np.int64]
    names: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_names: NDArray[np.uint8]
    numbered: NDArray[np.bool_]
    skipped: NDArray[np.uint8]
    unread: NDArray[np.int64]

    @property
    def names_of_labels(self) -> list[str]:
        """The names of the labels, in the order of their indices."""
        return os.fsdecode(self.label_names.tobytes()).split("\0")

    def with_labels(self, labels: NDArray[np.int64], names: Iterable[str]) -> "ShardIndex":
        """The same samples with other labels, which have names."""
        return replace(self, labels=labels, label_names=_packed("\0".join(names)), numbered=np.array(False))


def shard_index(
    root: str, shards: Sequence[FoundFile], read: Callable[[str, int], Part], *, kind: str, needed: str
) -> ShardIndex:
    """Index the samples of shards, or take them from the cache if no shard has changed its size or time since.

    Args:
        root: absolute, or an `s3://` or `gs://` URI.
        shards: below it.
        read: returns the samples of a shard, given its path and its size in bytes; raises ValueError for a broken one.
        kind: the kind of shards, which is the folder in the cache.
        needed: what messages ask for if there are no images.

    Raises:
        UsageError: broken shards, of which the first are named; numbers as well as names for labels; no images.
    """
    names = "\0".join(shard.name for shard in shards)
    place = f"{kind}/{digest(os.fsencode(root), os.fsencode(names))}.npz"
    times = np.array([(shard.size, shard.written) for shard in shards], "<i8")
    stamp = digest(_VERSION, os.fsencode(names), times.data)
    for held in cached_arrays(place):
        if str(held.pop("stamp", "")) == stamp:
            return ShardIndex(**held)
    index = _joined_index(root, _parts(root, shards, read), needed)
    cache_arrays(place, stamp=np.array(stamp), **vars(index))
    return index


def _parts(root: str, shards: Sequence[FoundFile], read: Callable[[str, int], Part]) -> list[Part]:
    if "://" in root:
        storage.file_system(root)  # opened once, before all threads need it
    with ThreadPoolExecutor(storage.CONNECTIONS if "://" in root else _THREADS) as threads:
        parts = []
        printed = time.monotonic()
        for part in threads.map(partial(_part_or_reason, root, read), shards):
            parts.append(part)
            if time.monotonic() - printed >= _LINE_SECONDS:
                printed = time.monotonic()
                print(f"indexing {root}: {len(parts)} of {plural(len(shards), 'shard')}", file=sys.stderr)
    if broken := [reason for reason in parts if isinstance(reason, str)]:
        raise UsageError(
            f"{len(broken)} of {plural(len(shards), 'shard')} in {root} cannot be indexed "
            f"({summarize(broken, separator='; ')}): correct or remove them"
        )
    return [part for part in parts if isinstance(part, Part)]


def _part_or_reason(root: str, read: Callable[[str, int], Part], shard: FoundFile) -> Part | str:
    path = f"{root}/{shard.name}"
    try:
        return read(path, shard.size)
    except OSError as error:
        return f"{path}: {storage.reason(error)}"
    except ValueError as error:
        return f"{path}: {error}"


def _joined_index(root: str, parts: Sequence[Part], needed: str) -> ShardIndex:
    """Return the index of some shards. See `shard_index` for arguments and errors."""
    values = {*chain.from_iterable(part.labels for part in parts)}
    numbers = {value for value in values if isinstance(value, int)}
    if numbers and numbers != values:
        number, name = next(iter(numbers)), next(iter(values - numbers))
        raise UsageError(f"{root} has both numbers and names as labels, such as {number} and {name!r}: unify them")
    if not values:
        raise UsageError(f"{root} has {plural(len(parts), 'shard')} without images: give {needed}")
    ordered: list[Any] = sorted(values)
    places = {value: place for place, value in enumerate(ordered)}
    offsets, lengths = np.concatenate([part.positions for part in parts]).T
    return ShardIndex(
        counts=np.array([len(part.labels) for part in parts]),
        names=_packed(b"".join(part.names for part in parts)),
        offsets=np.ascontiguousarray(offsets),
        lengths=np.ascontiguousarray(lengths),
        labels=np.fromiter(map(places.__getitem__, chain.from_iterable(part.labels for part in parts)), np.int64),
        label_names=_packed("\0".join(map(str, ordered))),
        numbered=np.array(bool(numbers)),
        skipped=_packed(json.dumps(sum((Counter(part.skipped) for part in parts), Counter()))),
        unread=np.array(sum(part.unread for part in parts)),
    )


def _packed(text: bytes | str) -> NDArray[np.uint8]:
    return np.frombuffer(os.fsencode(text), np.uint8)
