"""Many files by id, on local disks, in `s3://` and in `gs://`: the basis of every source that reads files.

Flat arrays pickle without copying (protocol 5), so that the workers of a node share one copy in Ray's object store.
"""

import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.read import storage
from raydali.data.read.contents import Contents, only, read
from raydali.errors import UsageError

# A path that needs no root.
_WHOLE = re.compile(r"/|[\w+.-]+://")

# In s3:// URIs DALI takes ? and # for a query and a fragment, and folds // and dots as in a file path; \0 joins paths.
_UNREADABLE_KEY = re.compile(r"[?#\0]|//|/\.\.?/")
_BYTES_AT_ONCE = 1 << 24
_PATHS_AT_ONCE = 1 << 16

Versions = NDArray[np.int64]
"""(N, 2): sizes in bytes, -1 where unknown; and positive numbers for ETags, 0 where unknown, or negative times of the
last change in ns, which tell versions apart, but may differ for the same content."""

LISTED: "dict[str, array[int]]" = {}
"""By the URI of a listed root, the newest last: for each object a hash of BUCKET/KEY, and its version."""


@dataclass(frozen=True, eq=False)
class Files:
    """N files by id 0..N-1. Made by `from_folders` or `from_list`.

    Attributes:
        root: an absolute path or a URI without a slash at its end; or "", and each path is absolute or a URI.
        packed_paths: uint8, the paths relative to the root, joined by NUL.
        offsets: int64 (N + 1,), where each path begins in packed_paths, and their end.
        missing: ids of listed files that do not exist, as far as that was checked.
        versions: of the files, see `Versions`; None if they were not listed in a bucket.
    """

    root: str
    packed_paths: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    missing: tuple[int, ...] = field(default=(), kw_only=True)
    versions: Versions | None = field(default=None, kw_only=True)

    @classmethod
    def from_folders(cls, root: str, names: Iterable[tuple[str, Sequence[str]]], **fields: Any) -> Self:
        """Index the files of some folders below a root, in the order given; millions of files are fine.

        Args:
            root: see `absolute`.
            names: folders relative to the root, "" for the root itself, each with the names of its files. An iterator
                that drops them as it goes needs less memory.
            fields: the fields of a subclass.

        Raises:
            UsageError: an unknown kind of root; an object whose name DALI cannot read.
        """
        root = absolute(root)
        packed = bytearray()
        for folder, of_folder in names:
            if of_folder:
                prefix = os.path.join(folder, "")
                if "://" in root:
                    for name in of_folder:
                        _check_key(f"{root}/{prefix}{name}")
                packed += os.fsencode(prefix + f"\0{prefix}".join(of_folder)) + b"\0"
        return cls(root, *_unpacked(packed), **fields)._with_versions()

    @classmethod
    def from_list(cls, root: str, paths: Sequence[str], **fields: Any) -> Self:
        """Index the files at these paths, in the order given.

        A path is absolute, an `s3://` or `gs://` URI, or relative to the root. If all are relative, the index has a
        root: `relocate` can move it, and its fingerprint does not depend on the location.

        Args:
            root: see `absolute`.
            paths: as in the file system; `~` is not expanded.
            fields: the fields of a subclass.

        Raises:
            UsageError: an unknown kind of root or URI; a path with a NUL; an object whose name DALI cannot read.
        """
        packer = PathPacker(root)
        for path in paths:
            check_path(packer.root, path)
        packer.add(paths)
        return cls(*packer.packed(), **fields)._with_versions()

    def _with_versions(self) -> Self:
        """Return the index with the versions of its files, if the newest listings have all of them."""
        if "://" not in self.root or not any(LISTED.values()):
            return self
        rows, prefix = np.concatenate([*LISTED.values()]).reshape(-1, 3), f"{self.root.partition('://')[2]}/"
        wanted = np.fromiter((hash(prefix + path) for path in self.relative_paths()), np.int64)
        order = np.argsort(rows[:, 0], kind="stable")
        newest = rows[order[np.searchsorted(rows[:, 0], wanted, "right", sorter=order) - 1]]
        return replace(self, versions=newest[:, 1:]) if (newest[:, 0] == wanted).all() else self

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def __str__(self) -> str:
        """For messages: the root, or the first file if there is no root."""
        return self.root or f"the list of {self.path(0)} and {len(self) - 1} more"

    def relocate(self, root: str) -> Self:
        """The same index for a copy of the data at another root, which is not checked.

        Raises:
            UsageError: an unknown kind of root; the index has no root, since it holds absolute paths or URIs.
        """
        if not self.root:
            raise UsageError(f"{self} cannot be moved to {root}: list paths relative to a root")
        return replace(self, root=absolute(root))

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these samples; the ids of those after them change."""
        kept = np.delete(np.arange(len(self)), np.fromiter(ids, np.int64))
        return replace(self, **self._only(kept))

    def _only(self, kept: NDArray[np.int64]) -> dict[str, Any]:
        """The fields of an index of only these files."""
        packed, offsets = only_names(np.append(self.packed_paths, np.uint8(0)), self.offsets, kept)
        missing = tuple(np.flatnonzero(np.isin(kept, self.missing)).tolist()) if self.missing else ()
        versions = None if self.versions is None else self.versions[kept]
        return {"packed_paths": packed[:-1], "offsets": offsets, "missing": missing, "versions": versions}

    def path(self, id: int) -> str:
        """The absolute path or the URI of a file."""
        return _decoded(self.encoded_paths(np.array([id]))[0])

    def relative_paths(self) -> Iterator[str]:
        """Yield the paths as they are in the index, in parts: as text, all would take several times its memory."""
        ends = [*self.offsets[_PATHS_AT_ONCE::_PATHS_AT_ONCE].tolist(), int(self.offsets[-1])]
        for begin, end in pairwise([0, *dict.fromkeys(ends)]):
            yield from os.fsdecode(self.packed_paths[begin : end - 1].tobytes()).split("\0")

    def encoded_paths(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The bytes of these files' absolute paths or URIs."""
        root, paths = os.fsencode(os.path.join(self.root, "")), self.packed_paths.data
        begins, ends = self.offsets[ids].tolist(), (self.offsets[ids + 1] - 1).tolist()
        return [np.frombuffer(root + paths[b:e], np.uint8) for b, e in zip(begins, ends, strict=True)]

    def contents(self, ids: NDArray[np.int64]) -> Contents:
        """The contents of these files, each uint8, or why it cannot be read."""
        return read(self._padded_paths(ids) if self._is_local else self.parts(ids))

    def parts(self, ids: NDArray[np.int64]) -> list[storage.ObjectPart]:
        """Return the places of these files, local ones too, with the size of those that have an ETag."""
        versions = [storage.UNKNOWN] * len(ids) if self.versions is None else self.versions[ids].tolist()
        return [
            storage.ObjectPart(_decoded(path), 0, None, size if tag > 0 else None, tag)
            for path, (size, tag) in zip(self.encoded_paths(ids), versions, strict=True)
        ]

    @cached_property
    def _is_local(self) -> bool:
        return "://" not in self.root and (self.root != "" or b"://" not in self.packed_paths.tobytes())

    def _padded_paths(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        root = np.frombuffer(os.fsencode(os.path.join(self.root, "")), np.uint8)
        begins, lengths = self.offsets[ids], self.offsets[ids + 1] - 1 - self.offsets[ids]
        places = np.arange(lengths.max(initial=0))
        paths = self.packed_paths.take(begins[:, None] + places, mode="clip") * (places < lengths[:, None])
        return np.hstack([np.broadcast_to(root, (len(ids), len(root))), paths])

    def read(self, id: int) -> bytes:
        """The content of a file.

        Raises:
            OSError: it cannot be read; names its path.
        """
        return only(self.contents(np.array([id])))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the relative paths, 32 hex digits; without the root, so that the data may move."""
        return digest(self.packed_paths.data)


class PathPacker:
    """Packs the paths of `Files`, a part at a time: as text they would take several times the memory.

    Args:
        root: see `absolute`.
    """

    def __init__(self, root: str) -> None:
        self.root = absolute(root)
        self._packed = bytearray()

    def add(self, paths: Sequence[str]) -> None:
        """Add some paths, see `Files.from_list`, which `check_path` accepts."""
        joined = "\0".join(paths)
        some_whole = joined.startswith("/") or "\0/" in joined or "://" in joined
        if self.root and some_whole and any(map(_WHOLE.match, paths)):
            prefix, self.root = os.fsencode(os.path.join(self.root, "")), ""
            self._prefix = os.fsdecode(prefix)
            if self._packed:
                self._packed = bytearray(prefix + self._packed[:-1].replace(b"\0", b"\0" + prefix) + b"\0")
        if not self.root:
            paths = [path if _WHOLE.match(path) else self._prefix + path for path in paths]
            joined = "\0".join(paths)
        if paths:
            self._packed += os.fsencode(joined) + b"\0"

    def packed(self) -> tuple[str, NDArray[np.uint8], NDArray[np.int64]]:
        """Return root, packed_paths and offsets of `Files`; nothing can be added afterwards."""
        return self.root, *_unpacked(self._packed)


def check_path(root: str, path: str) -> None:
    """Check a path of `Files.from_list`.

    Raises:
        UsageError: it has a NUL, or is an unknown kind of URI, or an object whose name DALI cannot read.
    """
    if "\0" in path:
        raise UsageError(f"{path!r} is not a path: remove its NUL")
    if not _WHOLE.match(path):
        if "://" in root:
            _check_key(f"{root}/{path}")
    elif not path.startswith("/"):
        _check_key(absolute(path))


def absolute(root: str) -> str:
    """The absolute path of a local root (`~` is expanded), or its `s3://` or `gs://` URI, without a slash at the end.

    Raises:
        UsageError: another kind of URI, one without a bucket, or one that contains a key.
    """
    storage.refuse_secrets(root)
    if "://" not in root:
        # Not os.path.abspath: it resolves `link/..` as text, to another folder than the kernel does.
        return str(Path(os.path.expanduser(root)).absolute())
    if not re.match(r"(s3|gs)://[\w.-]+(/|$)", root):
        raise UsageError(f"{root} cannot be read: give a local path, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
    return root.rstrip("/")


def digest(*parts: bytes | memoryview) -> str:
    """A hash of these parts and of their boundaries, 32 hex digits."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(memoryview(part).nbytes.to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()


def only_names(
    packed: NDArray[np.uint8], offsets: NDArray[np.int64], kept: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Select some of the names in a packed array, each ended by a NUL; returns them and their offsets."""
    lengths = np.diff(offsets)
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[kept] = True
    return packed[np.repeat(chosen, lengths)], np.concatenate([[0], np.cumsum(lengths[chosen])])


def _check_key(uri: str) -> None:
    path = uri.partition("://")[2]
    if _UNREADABLE_KEY.search(path):
        raise UsageError(f"DALI cannot read {path!r}: rename it without ?, #, //, /./ and /../")


def _unpacked(ended: bytearray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """packed_paths and offsets of paths that are each ended by a NUL."""
    packed = np.frombuffer(ended, np.uint8)
    offsets = np.zeros(ended.count(0) + 1, np.int64)
    filled = 1
    for begin in range(0, len(packed), _BYTES_AT_ONCE):
        ends = np.flatnonzero(packed[begin : begin + _BYTES_AT_ONCE] == 0)
        np.add(ends, begin + 1, out=offsets[filled : filled + len(ends)])
        filled += len(ends)
    return packed[:-1], offsets


def _decoded(path: NDArray[np.uint8]) -> str:
    return os.fsdecode(path.tobytes())
