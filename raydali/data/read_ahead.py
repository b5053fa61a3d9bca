"""Small parts of a large file, on a local disk or in an object store, for those who walk through its headers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raydali.data import object_store

Read = Callable[[int, int], bytes]
"""`read(offset, length)`: that part of the file; less where it ends."""

_LOCAL_WINDOW = 4096
_REMOTE_WINDOW = 4 << 20  # what is smaller than that is read over: faster than a request for each header


@contextmanager
def open_ahead(path: str, size: int) -> Iterator[Read]:
    """Reads parts of a file, ahead in windows.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.
        size: in bytes.
    """
    if "://" in path:
        with object_store.file_system(path).open_input_file(path.partition("://")[2]) as file:
            yield _windows(lambda offset, length: file.read_at(min(length, size - offset), offset), _REMOTE_WINDOW)
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _windows(lambda offset, length: os.pread(handle, length, offset), _LOCAL_WINDOW)
    finally:
        os.close(handle)


def _windows(fetch: Read, window: int) -> Read:
    begin, held = 0, b""

    def read(offset: int, length: int) -> bytes:
        nonlocal begin, held
        if not begin <= offset <= offset + length <= begin + len(held):
            begin, held = offset, fetch(offset, max(length, window))
        return held[offset - begin : offset - begin + length]

    return read
