"""Labelled images in tar shards, as WebDataset writes them, read at random without unpacking.

    samples --> shard, offset, length, label     tar_index.py, once
    ids     --> slices of mapped files, on local disks; range reads, from s3:// and gs://

Which member is whose image and what is its label: tar_index.py. A shard may not change while it is in use.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data import object_store
from raydali.data.files import absolute, digest, only_names
from raydali.data.labeled_files import some
from raydali.data.patterns import find_files, folder_entries
from raydali.data.tar_index import tar_index
from raydali.errors import UsageError

_ENDINGS = (".tar", ".tar.gz", ".tgz")  # the last two are refused, with the reason
_READING_THREADS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TarShards:
    """N images in S tar archives, by id 0..N-1: by shard, then by place in it. Made by `scan`.

    Attributes:
        root: an absolute path or a URI, with no slash at its end.
        shards: S paths relative to the root.
        sizes: int64 (S,), of the shards, in bytes.
        shard_numbers: int32 (N,), indices into shards.
        offsets, lengths: int64 (N,), where an image lies in its shard, in bytes.
        packed_names: uint8, of the images' members, each ended by a NUL.
        name_offsets: int64 (N + 1,), where each begins in packed_names, and where one more would.
        labels: int64 (N,), indices into classes.
        classes: their names.
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

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None) -> Self:
        """The images of some shards.

        Classes are the labels that occur, sorted: numbers by value, and names as class folders are. Numbers that do
        not begin at 0, or leave one out, are warned about: labels are then others than they say.

        Args:
            data: a folder with *.tar in it, or shards as WebDataset's users write them, `shard-{000000..000146}.tar`,
                `{a,b}-0.tar` or `shard-*.tar`, where * may stand in the names of files alone; local (`~` is expanded),
                or an `s3://` or `gs://` URI.
            classes: what the labels may be, in order: for validation those of the training set. Default: any.

        Raises:
            UsageError: shards are missing, cannot be read or hold no samples; see `tar_index`. A label is not among
                the classes.
        """
        root, shards = find_files(data if names_shards(data) else f"{data.rstrip('/')}/*.tar")
        index = tar_index(root, shards)
        if index.left_out:
            _log.warning("%s: keys with a label but no image, which are left out: %d", data, index.left_out)
        found = os.fsdecode(index.label_names.tobytes()).split("\0")
        labels = index.labels
        if classes is not None:
            known = {name: place for place, name in enumerate(classes)}
            if unknown := [name for name in found if name not in known]:
                raise UsageError(
                    f"{data}: {some(unknown)} is none of the {len(known)} classes of the training set: label both alike"
                )
            labels = np.array([known[name] for name in found])[labels]
        elif index.numbered and found[-1] != str(len(found) - 1):
            _log.warning("%s: labels are not 0..%d: sorted, %s are", data, len(found) - 1, some(found))
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
        )

    def __len__(self) -> int:
        """N."""
        return len(self.offsets)

    def __str__(self) -> str:
        """For messages: the root."""
        return self.root

    def at(self, root: str) -> Self:
        """The same index for a copy of the shards at another root, which is not looked at.

        Raises:
            UsageError: a root of another kind.
        """
        return replace(self, root=absolute(root))

    def without(self, ids: Iterable[int]) -> Self:
        """An index of the others; what follows has other ids."""
        kept = np.setdiff1d(np.arange(len(self)), np.fromiter(ids, np.int64))
        names, name_offsets = only_names(self.packed_names, self.name_offsets, kept)
        arrays = {name: getattr(self, name)[kept] for name in ("shard_numbers", "offsets", "lengths", "labels")}
        return replace(self, packed_names=names, name_offsets=name_offsets, **arrays)

    def path(self, id: int) -> str:
        """The absolute path or the URI of the shard, a colon, and the image's name in it."""
        begin, end = self.name_offsets[id : id + 2].tolist()
        return f"{self._shard(id)}:{os.fsdecode(self.packed_names[begin : end - 1].tobytes())}"

    def _shard(self, id: int) -> str:
        return f"{self.root}/{self.shards[self.shard_numbers[id]]}"

    @property
    def dali_reads(self) -> bool:
        """False: DALI gets contents."""
        return False

    def files(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The contents of these images, uint8 each, read-only; local ones are slices of the mapped shards.

        Raises:
            StoreError: an image cannot be read, or its shard has another size than when it was indexed; names it.
        """
        with ThreadPoolExecutor(_READING_THREADS) as threads:
            # In parts, since handing single images from thread to thread takes as long as reading them.
            parts = threads.map(self._contents, np.array_split(ids, _READING_THREADS))
            return list(chain.from_iterable(parts))

    def _contents(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        contents = [self._content(id) for id in ids.tolist()]
        for content in contents:
            # A mapped file is read where it is looked at: so here, on many threads, and not in DALI's one.
            content.max(initial=0)
        return contents

    def _content(self, id: int) -> NDArray[np.uint8]:
        path, size = self._shard(id), int(self.sizes[self.shard_numbers[id]])
        begin, length = int(self.offsets[id]), int(self.lengths[id])
        try:
            if "://" not in path:
                return _mapped(path, size)[begin : begin + length]
            return np.frombuffer(_opened(path, size, os.getpid()).read_at(length, begin), np.uint8)
        except OSError as error:
            raise object_store.StoreError(f"cannot read {self.path(id)}: {object_store.reason(error)}") from error

    def read(self, id: int) -> bytes:
        """The content of an image.

        Raises:
            StoreError: as `files` does.
        """
        return self._content(id).tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the shards' relative paths, the names of images in each, labels and classes; not of the
        root, so the data may move."""
        names = (os.fsencode("\0".join(part)) for part in (self.shards, self.classes))
        numbers = self.shard_numbers.astype("<i4"), self.labels.astype("<i8")
        return digest(*names, self.packed_names.data, *(part.data for part in numbers))


def is_shards(data: str) -> bool:
    """Whether these are tar shards: by name, or a folder that holds *.tar and no folders.

    Beside class folders archives do not count: people leave those there that they unpacked.
    """
    if names_shards(data):
        return True
    try:
        entries = [*folder_entries(absolute(data))]
    except (OSError, UsageError):  # who is to read it says why not
        return False
    return any(file.name.endswith(".tar") for file in entries if file is not None) and None not in entries


def names_shards(data: str) -> bool:
    """Whether this is the name or the pattern of tar shards, and not of a folder."""
    return data.lower().endswith(_ENDINGS) and not os.path.isdir(os.path.expanduser(data))


# What a process has opened it keeps. Arrow maps a file without holding it open: a process may have few files open, and
# a data set may have many shards.


@cache
def _mapped(path: str, size: int) -> NDArray[np.uint8]:
    import pyarrow

    with pyarrow.memory_map(path) as file:
        _check_size(file.size(), size)
        return np.frombuffer(file.read_buffer(), np.uint8)


# By process, since a forked one must not speak on its parent's connections.
@cache
def _opened(path: str, size: int, process: int) -> Any:
    file = object_store.file_system(path).open_input_file(path.partition("://")[2])
    _check_size(file.size(), size)
    return file


def _check_size(now: int, indexed: int) -> None:
    if now != indexed:
        raise OSError(f"the shard has {now} bytes, and had {indexed} when it was indexed: start again")
