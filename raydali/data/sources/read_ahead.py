"""Reads small parts of a large file, on a local disk or in an object store: for walking through its headers."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raydali.data.sources import storage

Read = Callable[[int, int], bytes]
"""`read(offset, length)`: that part of the file, shorter at its end."""

_LOCAL_WINDOW = 4096
_SMALL_WINDOW, _LARGE_WINDOW = 8192, 4 << 20
_READ_OVER = 64 << 10
"""Bytes, in object stores: a smaller gap between two headers is read too, else each header is a request."""
_KEPT = 3
"""Number of windows kept, for readers that go back."""
_WEIGHT = 1 / 8  # of the newest distance in the running mean


@contextmanager
def open_ahead(path: str, size: int) -> Iterator[Read]:
    """Open a file to read parts of it, ahead in windows.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.
        size: in bytes.
    """
    if "://" in path:
        with storage.file_system(path).open_input_file(path.partition("://")[2]) as file:
            yield _windows(lambda offset, length: file.read_at(min(length, size - offset), offset), _LARGE_WINDOW)
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _windows(lambda offset, length: os.pread(handle, length, offset), _LOCAL_WINDOW, _LOCAL_WINDOW)
    finally:
        os.close(handle)


def _windows(fetch: Read, large: int, small: int = _SMALL_WINDOW) -> Read:
    windows: deque[tuple[int, bytes]] = deque([(0, b"")], maxlen=_KEPT)
    last, distance = 0, 2.0 * _READ_OVER

    def read(offset: int, length: int) -> bytes:
        nonlocal last, distance
        if offset - last > small:
            distance += (offset - last - distance) * _WEIGHT
        last = offset
        for begin, held in windows:
            if begin <= offset <= offset + length <= begin + len(held):
                return held[offset - begin : offset - begin + length]
        held = fetch(offset, max(length, large if distance < _READ_OVER else small))
        if len(windows[0][1]) > small:
            windows.popleft()
        windows.appendleft((offset, held))
        return held[:length]

    return read
