"""Labelled images in shards, read at random without unpacking: as parts of larger files.

    samples --> shard, offset, length, label     tar.py, tfrecord.py or parquet.py, once; the index is cached
    ids     --> reads of a shard's bytes at an offset, on local disks as from s3:// and gs://

A shard must not change while it is in use: one whose size differs from the indexed one is reported by name.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.file_rules import describe_skipped
from raydali.data.index.files import Versions, absolute, digest, only_names
from raydali.data.index.listing import FoundFile
from raydali.data.index.shard_index import ShardIndex
from raydali.data.read import storage
from raydali.data.read.contents import Contents, only, read
from raydali.errors import UsageError
from raydali.text import plural, summarize

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shards:
    """N images in S shards, by id 0..N-1: by shard, then by position.

    The base of `TarShards`, `TFRecords` and `Parquet`.

    Attributes:
        root: an absolute path or a URI, without a slash at its end.
        shards: S paths relative to the root.
        sizes: int64 (S,), sizes of the shards in bytes.
        tags: int64 (S,), numbers for their versions, see `files.Versions`.
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
    tags: NDArray[np.int64]
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
    in_ranges: ClassVar[bool] = True
    """An image is a range of its shard's bytes."""
    first_labels: ClassVar[tuple[int, ...]] = (0,)
    """Values at which numeric labels may begin."""

    @classmethod
    def of_index(
        cls,
        data: str,
        root: str,
        shards: Sequence[FoundFile],
        index: ShardIndex,
        classes: Sequence[str] | None,
        **fields: Any,
    ) -> Self:
        """Make a source of the images in an index.

        Classes are the labels that occur, sorted: numbers by value, and names as class folders are. Warns if
        numeric labels are not contiguous from one of `first_labels`, because class indices then differ from them.

        Args:
            data: the name of the data in messages.
            root: of the shards, absolute, or an `s3://` or `gs://` URI.
            shards: the shards of the index, below the root.
            index: see `shard_index`.
            classes: the allowed labels in order, for validation the labels of the training set. Default: any.
            fields: the fields of a subclass.

        Raises:
            UsageError: a label is not among the classes.
        """
        skipped: dict[str, int] = json.loads(index.skipped.tobytes())
        if skipped:
            _log.warning("%s: %s", data, describe_skipped(skipped))
        if index.unread:
            _log.warning("%s: skipped %s after the ends of archives", data, plural(int(index.unread), "byte"))
        names, labels = index.names_of_labels, index.labels
        if classes is not None:
            places = {name: place for place, name in enumerate(classes)}
            if unknown := [name for name in names if name not in places]:
                shown = summarize(unknown, show=repr)
                raise UsageError(f"{data} has labels that the training set lacks, {shown}: give both the same classes")
            labels = np.array([places[name] for name in names])[labels]
        elif index.numbered:
            whole = {(str(first), str(first + len(names) - 1)) for first in cls.first_labels}
            if (names[0], names[-1]) not in whole:
                warn_of_renumbering(data, names)
        return cls(
            root=root,
            shards=tuple(shard.name for shard in shards),
            sizes=np.array([shard.size for shard in shards]),
            tags=np.array([-shard.written for shard in shards]),
            shard_numbers=np.repeat(np.arange(len(shards), dtype=np.int32), index.counts),
            offsets=index.offsets,
            lengths=index.lengths,
            packed_names=index.names,
            name_offsets=np.concatenate([[0], np.flatnonzero(index.names == 0) + 1]),
            labels=labels,
            classes=tuple(names if classes is None else classes),
            skipped=skipped,
            **fields,
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
        return f"{self.shard(id)}{self.mark}{os.fsdecode(self.packed_names[begin : end - 1].tobytes())}"

    def relative_paths(self) -> Iterator[str]:
        """Yield the paths of all images, relative to the root."""
        begin = len(self.root) + 1
        return (self.path(id)[begin:] for id in range(len(self)))

    def shard(self, id: int) -> str:
        """The absolute path or the URI of the shard of an image."""
        return f"{self.root}/{self.shards[self.shard_numbers[id]]}"

    @property
    def versions(self) -> Versions:
        """The lengths of the images, and the versions of their shards."""
        return np.stack([self.lengths, self.tags[self.shard_numbers]], 1)

    def contents(self, ids: NDArray[np.int64]) -> Contents:
        """The contents of these images, each uint8, or why it cannot be read."""
        return read(self.parts(ids))

    def parts(self, ids: NDArray[np.int64]) -> list[storage.ObjectPart]:
        """Return the places of these images, local ones too; the whole shards if images are no ranges of bytes."""
        return [*map(self._part, ids.tolist())]

    def _part(self, id: int) -> storage.ObjectPart:
        number = self.shard_numbers[id]
        begin, length = (int(self.offsets[id]), int(self.lengths[id])) if self.in_ranges else (0, None)
        return storage.ObjectPart(self.shard(id), begin, length, int(self.sizes[number]), int(self.tags[number]))

    def read(self, id: int) -> bytes:
        """The content of an image.

        Raises:
            StoreError: it cannot be read, or the size of its shard has changed; names it.
        """
        try:
            return only(self.contents(np.array([id])))
        except storage.StoreError as error:
            raise storage.StoreError(f"{self.path(id)} cannot be read: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the shards' relative paths, names of images, labels and classes, 32 hex digits.

        The root is not part of it, so that the data may move.
        """
        names = (os.fsencode("\0".join(part)) for part in (self.shards, self.classes))
        numbers = self.shard_numbers.astype("<i4"), self.labels.astype("<i8")
        return digest(*names, self.packed_names.data, *(part.data for part in numbers))


def warn_of_renumbering(data: str, labels: Sequence[str]) -> None:
    """Warn that class indices differ from the labels, which are numbers."""
    order = plural(len(labels), "class"), summarize(labels, show=repr)
    _log.warning("%s: the labels are not class indices from 0, which gives %s in this order: %s", data, *order)
