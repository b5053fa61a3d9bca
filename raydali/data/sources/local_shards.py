"""Reads bytes at an offset of local shards, whose descriptors a process keeps open.

The files are not mapped: if a mapped file shrinks or its disk fails, SIGBUS ends the process without naming the file,
while a read is an error.
"""

import os

KEPT = 256
"""Limit of open descriptors: a process may open 1,024 files by default, and a data set may have many shards."""


class _Shard:
    """An open shard, which is closed when the last thread that uses it drops it."""

    def __init__(self, path: str, size: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        check_size(os.fstat(self.descriptor).st_size, size)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# Without a lock, which a fork might copy while it is held: each of the operations below is atomic under the GIL.
_kept: dict[tuple[str, int], _Shard] = {}


def read(path: str, size: int, begin: int, length: int) -> bytes:
    """Read bytes of a shard.

    Args:
        path: absolute.
        size: the shard's size when it was indexed, in bytes.
        begin: the offset in bytes.
        length: the number of bytes.

    Raises:
        FileNotFoundError: there is no such shard, or it has another size now.
        OSError: it cannot be read; the next call opens it again.
    """
    shard = _kept.get((path, size))
    if shard is None:
        shard = _kept[path, size] = _Shard(path, size)
        for oldest in list(_kept)[:-KEPT]:
            _kept.pop(oldest, None)
    try:
        content = os.pread(shard.descriptor, length, begin)
        while len(content) < length:
            part = os.pread(shard.descriptor, length - len(content), begin + len(content))
            if not part:
                check_size(os.fstat(shard.descriptor).st_size, size)
                raise FileNotFoundError(f"the shard ends before byte {begin + length}: start again")
            content += part
        return content
    except OSError:
        _kept.pop((path, size), None)
        raise


def check_size(now: int, indexed: int) -> None:
    """Check that a shard has the size, in bytes, that was indexed.

    Raises:
        FileNotFoundError: it has another size.
    """
    if now != indexed:
        raise FileNotFoundError(f"the shard has {now} bytes, and had {indexed} when it was indexed: start again")
