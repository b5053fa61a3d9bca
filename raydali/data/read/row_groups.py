"""Reads images out of the row groups of Parquet files, whose rows cannot be read one by one.

A process keeps the row groups that it read last, decoded, so that images near each other are read once. Its threads
share them, and wait for each other instead of reading one twice.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache, partial
from io import RawIOBase
from typing import TYPE_CHECKING, Any, NamedTuple

from raydali.data.read import storage
from raydali.data.read.file_parts import read_part
from raydali.data.read.storage import ObjectPart

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

KEPT_BYTES = 1 << 30
"""Limit of the decoded row groups that a process keeps."""
_READ_AT_ONCE = KEPT_BYTES // 4  # bytes
_FOOTERS = 1024

Images = Any
"""An Arrow array of the images of a row group."""


class RowGroups:
    """The row groups that were used last, up to a number of bytes.

    Args:
        limit: bytes that are kept; the newest row group is kept even if it is larger.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._groups: OrderedDict[Hashable, Future[Images]] = OrderedDict()
        self._kept_bytes = self._read_bytes = 0

    def get(self, key: Hashable, size: int, load: Callable[[], Images]) -> Images:
        """Return a row group that is kept, or load it.

        Args:
            key: what it is called.
            size: the bytes that loading it takes; other threads wait while much is under way.
            load: decodes it, and may raise any error, which all threads get that wait for it.
        """
        with self._changed:
            future = self._groups.get(key)
            if future is None:
                loading = self._groups[key] = Future[Images]()
            else:
                self._groups.move_to_end(key)
        if future is not None:
            return future.result()
        try:
            with self._turn(size):
                images = load()
        except BaseException as error:
            with self._changed:
                del self._groups[key]
            loading.set_exception(error)
            raise
        with self._changed:
            loading.set_result(images)
            self._kept_bytes += images.nbytes
            for other, kept in [*self._groups.items()]:
                if self._kept_bytes > self._limit and kept.done() and other != key:
                    self._kept_bytes -= self._groups.pop(other).result().nbytes
        return images

    @contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._read_bytes or self._read_bytes + size <= _READ_AT_ONCE)
            self._read_bytes += size
        try:
            yield
        finally:
            with self._changed:
                self._read_bytes -= size
                self._changed.notify_all()


_groups = RowGroups()


def _reset_after_fork() -> None:
    global _groups
    _groups = RowGroups()


# A forked process may not use a lock that a thread of its parent holds.
os.register_at_fork(after_in_child=_reset_after_fork)


class RowPart(NamedTuple):
    """An image of a Parquet file.

    Attributes:
        file: a whole one, local or in a bucket, with its size when it was indexed.
        column: the column of the images.
        group: the row group, from 0.
        row: in the row group, from 0.
    """

    file: ObjectPart
    column: str
    group: int
    row: int


def read_row(part: RowPart) -> bytes:
    """The bytes of an image; empty if the file has none there.

    Raises:
        StoreError: the file cannot be read, or its size has changed; names it.
        OSError: the row group is damaged.
    """
    import pyarrow

    file, column, group, row = part
    try:
        chunk = _footer(file).row_group(group).column(image_leaf(_footer(file), column))
        in_memory = chunk.total_compressed_size + chunk.total_uncompressed_size
        images = _groups.get((file, column, group), in_memory, partial(_decoded, file, column, group))
    except storage.StoreError:
        raise
    except (OSError, pyarrow.ArrowException) as error:
        raise OSError(errno.EBADMSG, f"row group {group} is damaged: {' '.join(str(error).split())}") from None
    return images[row].as_py() or b""


def image_leaf(footer: "FileMetaData", column: str) -> int:
    """Return the index of the leaf column with the bytes of images: of the column itself, or of its field `bytes`."""
    leaves = (column, f"{column}.bytes")
    return next(leaf for leaf in range(footer.num_columns) if footer.schema.column(leaf).path in leaves)


def open_parquet(file: ObjectPart, footer: "FileMetaData | None" = None) -> "ParquetFile":
    """Open a file to index it, or to read row groups if the footer is known. Raises StoreError, or ArrowInvalid."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(_File(file), metadata=footer, pre_buffer=footer is None and "://" in file.uri)


def _decoded(file: ObjectPart, column: str, group: int) -> Images:
    footer = _footer(file)
    leaf = footer.schema.column(image_leaf(footer, column)).path
    images = open_parquet(file, footer).read_row_group(group, [leaf], use_threads=False).column(0)
    return images if leaf == column else images.flatten()[0]


@lru_cache(maxsize=_FOOTERS)
def _footer(file: ObjectPart) -> "FileMetaData":
    from pyarrow.parquet import read_metadata

    return read_metadata(_File(file))


class _File(RawIOBase):
    """A file as Arrow reads it. It raises what shards raise; an error of Arrow itself is about its content."""

    def __init__(self, file: ObjectPart) -> None:
        assert file.size is not None, "it was indexed"
        self._file, self._size, self._at = file, file.size, 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, length: int = -1) -> bytes:
        length = self._size - self._at if length < 0 else min(length, self._size - self._at)
        try:
            content = read_part(self._file._replace(offset=self._at, length=length))
        except OSError as error:
            raise storage.StoreError(f"{self._file.uri} cannot be read: {storage.reason(error)}") from error
        self._at += length
        return content
