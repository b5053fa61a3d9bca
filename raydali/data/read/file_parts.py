"""Reads parts of large files, on local disks and in object stores, which a process keeps open.

Local files are not mapped: if a mapped file shrinks or its disk fails, SIGBUS ends the process without naming the file,
while a read is an error.
"""

import os
from collections import deque
from collections.abc import Callable

from raydali.data.read.objects import read_objects
from raydali.data.read.storage import ObjectPart

Read = Callable[[int, int], bytes]
"""`read(offset, length)`: that part of a file, shorter at its end."""

KEPT = 256
"""Limit of open descriptors: a process may open 1,024 files by default, and a data set may have many shards."""
_LOCAL_WINDOW = 4096
_SMALL_WINDOW, _LARGE_WINDOW = 8192, 4 << 20
_READ_OVER = 64 << 10
"""Bytes, in object stores: a smaller gap between two headers is read too, else each header is a request."""
_WINDOWS_KEPT = 3  # for readers that go back
_WEIGHT = 1 / 8  # of the newest distance in the running mean


class _LocalFile:
    """An open file, which is closed when the last thread that uses it drops it."""

    def __init__(self, path: str, size: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        _check_size(self.size(), size)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_at(self, length: int, offset: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


# Without a lock, which a fork might copy while it is held: each of the operations below is atomic under the GIL.
_kept: dict[tuple[str, int], _LocalFile] = {}


def read_part(part: ObjectPart) -> bytes:
    """Read bytes of a file, also of a local one, whose size and length are given.

    Raises:
        FileNotFoundError: there is no such file, or it has another size now.
        OSError: it cannot be read; the next call opens it again.
    """
    path, offset, length, size, _ = part
    assert length is not None and size is not None, "see above"
    if "://" in path:
        (whole,) = read_objects([part])
        if isinstance(whole, OSError):
            raise whole
        return bytes(whole)
    file = _kept.get((path, size))
    if file is None:
        file = _kept[path, size] = _LocalFile(path, size)
        for oldest in list(_kept)[:-KEPT]:
            _kept.pop(oldest, None)
    try:
        content = file.read_at(length, offset)
        while len(content) < length:
            more = file.read_at(length - len(content), offset + len(content))
            if not more:
                _check_size(file.size(), size)
                raise FileNotFoundError(f"the shard ends before byte {offset + length}: start again")
            content += more
        return content
    except OSError:
        _kept.pop((path, size), None)
        raise


def _check_size(now: int, indexed: int) -> None:
    if now != indexed:
        raise FileNotFoundError(f"the shard has {now} bytes, and had {indexed} when it was indexed: start again")


def read_ahead(path: str, size: int) -> Read:
    """Return what reads small parts of a file, ahead in windows: for walking through its headers.

    Args:
        path: absolute, or an `s3://` or `gs://` URI.
        size: in bytes.
    """
    small, large = (_SMALL_WINDOW, _LARGE_WINDOW) if "://" in path else (_LOCAL_WINDOW, _LOCAL_WINDOW)
    windows: deque[tuple[int, bytes]] = deque([(0, b"")], maxlen=_WINDOWS_KEPT)
    last, distance = 0, 2.0 * _READ_OVER

    def read(offset: int, length: int) -> bytes:
        nonlocal last, distance
        if offset - last > small:
            distance += (offset - last - distance) * _WEIGHT
        last = offset
        for begin, held in windows:
            if begin <= offset <= offset + length <= begin + len(held):
                return held[offset - begin : offset - begin + length]
        window = max(length, large if distance < _READ_OVER else small)
        held = read_part(ObjectPart(path, offset, max(0, min(window, size - offset)), size))
        if len(windows[0][1]) > small:
            windows.popleft()
        windows.appendleft((offset, held))
        return held[:length]

    return read
