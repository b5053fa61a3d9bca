"""Labelled images in shards, read at random without unpacking: as parts of larger files.

    samples --> shard, offset, length, label     tar.py, tfrecord.py or parquet.py, once; the index is cached
    ids     --> reads of a shard's bytes at an offset, on local disks as from s3:// and gs://

A shard must not change while it is in use: one whose size differs from the indexed one is reported by name.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.cache import cache_arrays, cached_arrays
from raydali.data.sources.file_parts import read_part
from raydali.data.sources.file_rules import describe_skipped
from raydali.data.sources.files import absolute, digest, only_names, read_in_parts
from raydali.data.sources.labeled import allowed_labels, warn_of_renumbering
from raydali.data.sources.listing import FoundFile, find_files
from raydali.data.sources.reading import reading
from raydali.errors import UsageError
from raydali.text import plural, summarize

_VERSION = b"2"  # another one for another content of the cached file
_THREADS = 32
_LINE_SECONDS = 10.0

_log = logging.getLogger(__name__)

Label = int | str


@dataclass(frozen=True, eq=False)
class Shards:
    """N images in S shards, by id 0..N-1: by shard, then by position.

    The base of `TarShards`, `TFRecords`, `Parquet` and `IdxImages`.

    Attributes:
        root: an absolute path or a URI, without a slash at its end.
        shards: S paths relative to the root.
        sizes: int64 (S,), sizes of the shards in bytes.
        shard_numbers: int32 (N,), indices into shards.
        offsets, lengths: int64 (N,), the position of an image in its shard, in bytes.
        packed_names: uint8, names of the images in their shards, each ended by a NUL.
        name_offsets: int64 (N + 1,), where each begins in packed_names, and their end.
        labels: int64 (N,), indices into classes.
        classes: their names.
        skipped: the number of other files in the shards that could be samples but are not read, by kind.
    """

    root: str
    shards: tuple[str, ...]
    sizes: NDArray[np.int64]
    shard_numbers: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    packed_names: NDArray[np.uint8]
    name_offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    mark: ClassVar[str] = "#"
    """Separates a shard's path from an image's name in messages."""
    first_labels: ClassVar[tuple[int, ...]] = (0,)
    """Values at which numeric labels may begin."""

    @classmethod
    def of_pattern(
        cls,
        data: str,
        pattern: str,
        classes: Sequence[str] | None,
        index_of: Callable[[str, Sequence[FoundFile]], "ShardIndex"],
    ) -> Self:
        """Index the images in the shards of a pattern.

        Classes are the labels that occur, sorted: numbers by value, and names as class folders are. Warns if
        numeric labels are not contiguous from one of `first_labels`, because class indices then differ from them.

        Args:
            data: the name of the data in messages.
            pattern: see `find_files`.
            classes: the allowed labels in order, for validation those of the training set. Default: any.
            index_of: takes the root of the shards and the shards.

        Raises:
            UsageError: shards are missing, cannot be read or hold no samples. A label is not among the classes.
        """
        root, shards = find_files(pattern)
        index = index_of(root, shards)
        skipped: dict[str, int] = json.loads(index.skipped.tobytes())
        if skipped:
            _log.warning("%s: %s", data, describe_skipped(skipped))
        if index.unread:
            _log.warning("%s: skipped %s after the ends of archives", data, plural(int(index.unread), "byte"))
        found, labels = index.names_of_labels, index.labels
        if classes is not None:
            labels = allowed_labels(data, found, classes)[labels]
        elif index.numbered:
            whole = {(str(first), str(first + len(found) - 1)) for first in cls.first_labels}
            if (found[0], found[-1]) not in whole:
                warn_of_renumbering(data, found)
        return cls(
            root=root,
            shards=tuple(shard.name for shard in shards),
            sizes=np.array([shard.size for shard in shards]),
            shard_numbers=np.repeat(np.arange(len(shards), dtype=np.int32), index.counts),
            offsets=index.offsets,
            lengths=index.lengths,
            packed_names=index.names,
            name_offsets=np.concatenate([[0], np.flatnonzero(index.names == 0) + 1]),
            labels=labels,
            classes=tuple(found if classes is None else classes),
            skipped=skipped,
        )

    def __len__(self) -> int:
        """N."""
        return len(self.offsets)

    def __str__(self) -> str:
        """For messages: the root."""
        return self.root

    @property
    def one_each(self) -> NDArray[np.int64]:
        """The labels: each image has one."""
        return self.labels

    @property
    def dali_reads(self) -> bool:
        """False: DALI gets the contents."""
        return False

    def relocate(self, root: str) -> Self:
        """The same index for a copy of the shards at another root, which is not checked.

        Raises:
            UsageError: an unknown kind of root.
        """
        return replace(self, root=absolute(root))

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these samples; the ids of those after them change."""
        kept = np.delete(np.arange(len(self)), np.fromiter(ids, np.int64))
        names, name_offsets = only_names(self.packed_names, self.name_offsets, kept)
        arrays = {name: getattr(self, name)[kept] for name in ("shard_numbers", "offsets", "lengths", "labels")}
        return replace(self, packed_names=names, name_offsets=name_offsets, **arrays)

    def path(self, id: int) -> str:
        """The absolute path or the URI of the shard, the `mark`, and the image's name in it."""
        begin, end = self.name_offsets[id : id + 2].tolist()
        return f"{self._shard(id)}{self.mark}{os.fsdecode(self.packed_names[begin : end - 1].tobytes())}"

    def relative_paths(self) -> Iterator[str]:
        """Yield the paths of all images, relative to the root."""
        begin = len(self.root) + 1
        return (self.path(id)[begin:] for id in range(len(self)))

    def _shard(self, id: int) -> str:
        return f"{self.root}/{self.shards[self.shard_numbers[id]]}"

    def _size(self, id: int) -> int:
        return int(self.sizes[self.shard_numbers[id]])

    def files(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The contents of these images, uint8 each, read-only.

        Raises:
            StoreError: an image cannot be read, or the size of its shard has changed; names it.
        """
        return read_in_parts(lambda part: [np.frombuffer(self._content(id), np.uint8) for id in part.tolist()], ids)

    def _content(self, id: int) -> bytes:
        try:
            return read_part(self._shard(id), self._size(id), int(self.offsets[id]), int(self.lengths[id]))
        except OSError as error:
            raise storage.StoreError(f"{self.path(id)} cannot be read: {storage.reason(error)}") from error

    def read(self, id: int) -> bytes:
        """The content of an image.

        Raises:
            StoreError: see `files`.
        """
        with reading():
            return self._content(id)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the shards' relative paths, names of images, labels and classes, 32 hex digits.

        The root is not part of it, so that the data may move.
        """
        names = (os.fsencode("\0".join(part)) for part in (self.shards, self.classes))
        numbers = self.shard_numbers.astype("<i4"), self.labels.astype("<i8")
        return digest(*names, self.packed_names.data, *(part.data for part in numbers))


# ----------------------------------------------------------------------------------------------------------------------
# The index


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
    index = _joined(root, _parts(root, shards, read), needed)
    cache_arrays(place, stamp=np.array(stamp), **vars(index))
    return index


def _parts(root: str, shards: Sequence[FoundFile], read: Callable[[str, int], Part]) -> list[Part]:
    if "://" in root:
        storage.file_system(root)  # opened once, before all threads need it
    with ThreadPoolExecutor(storage.CONNECTIONS if "://" in root else _THREADS) as threads:
        found = []
        told = time.monotonic()
        for part in threads.map(partial(_part_or_reason, root, read), shards):
            found.append(part)
            if time.monotonic() - told >= _LINE_SECONDS:
                told = time.monotonic()
                print(f"indexing {root}: {len(found)} of {plural(len(shards), 'shard')}", file=sys.stderr)
    if broken := [reason for reason in found if isinstance(reason, str)]:
        raise UsageError(
            f"{len(broken)} of {plural(len(shards), 'shard')} in {root} cannot be indexed "
            f"({summarize(broken, separator='; ')}): correct or remove them"
        )
    return [part for part in found if isinstance(part, Part)]


def _part_or_reason(root: str, read: Callable[[str, int], Part], shard: FoundFile) -> Part | str:
    path = f"{root}/{shard.name}"
    try:
        return read(path, shard.size)
    except OSError as error:
        return f"{path}: {storage.reason(error)}"
    except ValueError as error:
        return f"{path}: {error}"


def _joined(root: str, parts: Sequence[Part], needed: str) -> ShardIndex:
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
