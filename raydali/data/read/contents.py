"""Reads the contents of files by their parts, many at a time; what cannot be read is a value and no exception.

paths of local files     DALI reads them in C++ (local_files.py)
objects, ranges of them  objects.py reads them, through the cache of the node
ranges of local files    file_parts.py reads them, on threads of this process
rows of Parquet files    row_groups.py reads them, on the same threads
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.read import local_files, storage
from raydali.data.read.file_parts import read_part
from raydali.data.read.objects import read_objects
from raydali.data.read.reading import reading
from raydali.data.read.row_groups import RowPart, read_row
from raydali.data.read.storage import ObjectPart, StoreError

_GROUPS = 32
"""Groups of the parts of a batch, each read by one thread: to pass each part alone takes as long as reading it."""
_READERS = 128
"""Threads of a process that read: as many as four batches have groups, which are read ahead at the same time."""

Parts = Sequence[ObjectPart | RowPart] | NDArray[np.uint8]
"""The places of samples. Paths of local files are the rows of one array, followed by NULs: DALI takes it fastest."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The value in place of a content that cannot be read, or of what cannot be made of it.

    Attributes:
        error: the reason; of a storage that does not answer, or of the sample.
    """

    error: Exception


Content = NDArray[np.uint8] | Failed
"""The bytes of a sample, read-only, or the reason why they cannot be read."""


class Contents(list[Content]):
    """The contents of some parts, in their order.

    Attributes:
        tensors: the same as a list of DALI, which DALI takes faster; None if there is none.
    """

    tensors: Any = None


def read(parts: Parts) -> Contents:
    """Return the contents of parts, read at the same time.

    Raises:
        MemoryError: there is no memory for them.
    """
    with reading():
        if not isinstance(parts, np.ndarray):
            return Contents(_read(parts))
        if (tensors := local_files.read_by_dali(parts)) is None:
            paths = (os.fsdecode(path.tobytes().rstrip(b"\0")) for path in parts)
            return Contents(_read([ObjectPart(path) for path in paths]))
        contents = Contents([np.asarray(tensors[place]) for place in range(len(tensors))])
        contents.tensors = tensors
        return contents


def only(contents: Contents) -> bytes:
    """Return the one content.

    Raises:
        FileNotFoundError, PermissionError: there is no such file, or no right to read it; names it.
        StoreError, OSError: the storage does not answer, or the size of a shard has changed; names it.
    """
    (content,) = contents
    if isinstance(content, Failed):
        raise content.error
    return content.tobytes()


def _read(parts: Sequence[ObjectPart | RowPart]) -> list[Content]:
    in_bucket = [isinstance(part, ObjectPart) and not part.uri.startswith("/") for part in parts]
    objects = read_objects([part for part, remote in zip(parts, in_bucket, strict=True) if remote])  # type: ignore[misc]
    others = _on_threads([part for part, remote in zip(parts, in_bucket, strict=True) if not remote])
    of_objects, of_others = iter(objects), iter(others)
    return [
        _content(part, next(of_objects) if remote else next(of_others))
        for part, remote in zip(parts, in_bucket, strict=True)
    ]


def _content(part: ObjectPart | RowPart, content: bytes | memoryview | Exception) -> Content:
    if not isinstance(content, Exception):
        return np.frombuffer(content, np.uint8)
    if isinstance(part, RowPart) or part.length is None or isinstance(content, StoreError):
        return Failed(content)
    error = StoreError(storage.reason(content))  # a shard is no sample
    error.__cause__ = content
    return Failed(error)


def _on_threads(parts: Sequence[ObjectPart | RowPart]) -> list[bytes | Exception]:
    size = -(-len(parts) // _GROUPS)
    if size * len(parts) <= 1:
        return _each(parts)
    groups = [parts[at : at + size] for at in range(0, len(parts), size)]
    return [*chain.from_iterable(_readers(os.getpid()).map(_each, groups))]


def _each(parts: Sequence[ObjectPart | RowPart]) -> list[bytes | Exception]:
    """Read parts one after the other."""
    contents: list[bytes | Exception] = []
    for part in parts:
        try:
            if isinstance(part, RowPart):
                contents.append(read_row(part))
            else:
                contents.append(Path(part.uri).read_bytes() if part.length is None else read_part(part))
        except MemoryError:
            raise
        except Exception as error:
            contents.append(error)
    return contents


# For each process, since a forked one has none of its parent's threads.
@cache
def _readers(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="readers")
