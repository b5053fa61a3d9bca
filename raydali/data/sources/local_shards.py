"""Bytes at an offset of local shards, whose descriptors a process keeps: by reads, not by a map of the file.

A mapped file that shrinks, or whose disk fails, ends the process by SIGBUS, and nothing names it: a read is an error.
"""

import os

KEPT = 256
"""Descriptors; a process may have few files open (1,024 by default), and a data set may have many shards."""


class _Shard:
    """One that is open, until the last thread that uses it lets go of it."""

    def __init__(self, path: str, size: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        check_size(os.fstat(self.descriptor).st_size, size)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# Without a lock, which a fork might copy while it is held: each of the operations below is one of the interpreter's.
_kept: dict[tuple[str, int], _Shard] = {}


def read(path: str, size: int, begin: int, length: int) -> bytes:
    """Return these bytes of a shard.

    Args:
        path: absolute.
        size: the shard's when it was indexed, in bytes.
        begin, length: in bytes.

    Raises:
        FileNotFoundError: there is no such shard, or it has another size now.
        OSError: it cannot be read; the next call opens it anew.
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
    """Refuse a shard whose size, in bytes, is not the one that was indexed.

    Raises:
        FileNotFoundError: it is not.
    """
    if now != indexed:
        raise FileNotFoundError(f"the shard has {now} bytes, and had {indexed} when it was indexed: start again")
