"""The entries of a node's cache on its disk, which all processes of the node share; node_cache.py reads through them.

An entry is a file: the content, and its hash. FOLDER/BUCKET/ab/cdef... is renamed into place, FOLDER/used counts the
bytes of all, FOLDER/node is the node's id, and FOLDER/groups the nodes of earlier worker groups.
"""

import contextlib
import fcntl
import glob
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from raydali.data.read.read_counts import COUNTS
from raydali.errors import UsageError

KEY_BYTES = HASH_BYTES = 16
MARGIN = 0.05
"""Share of a disk that is left free if no size is given."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)
_NODE = re.compile(r"[0-9a-f]{16}")
_GROUPS_KEPT = 8
ABANDONED_AFTER_SECONDS = 3600.0
"""Age of a partial entry that nobody writes any more."""
_SHARE = 1 << 25
"""Bytes that a process takes at once; of a small cache it takes less."""
_FULL_PAUSE = 60.0
"""Seconds without writing after a disk was full."""

_log = logging.getLogger(__name__)


class CacheOption(NamedTuple):
    """`DIR[:SIZE]`: the folder, absolute, and the number of bytes; None for the free space less a margin."""

    folder: str
    size: int | None

    @classmethod
    def parse(cls, text: str) -> "CacheOption":
        """Return the option in a text.

        Raises:
            UsageError: the size is not one, or the folder is not local.
        """
        folder, colon, size = text.rpartition(":")
        match = _SIZE.fullmatch(size) if colon else None
        if "://" in text or not (folder or size):
            raise UsageError(
                f"--cache {text} is not a folder of a node: give one on a local disk, such as /mnt/cache:500G"
            )
        if colon and match is None:
            raise UsageError(f"--cache {text} ends with no size: give DIR or DIR:SIZE, such as /mnt/cache:500G")
        number = None if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
        if number == 0:
            raise UsageError(f"--cache {text} has no room: give a size above 0, or leave out --cache")
        return cls(str(Path(folder if colon else text).expanduser().absolute()), number)


class Entries:
    """The entries on this node's disk, which all processes of the node share.

    Args:
        option: the folder and its size.

    Attributes:
        node: the id of the node, which stays with the folder.
        limit: bytes that all entries may have together.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, option: CacheOption) -> None:
        self.folder = option.folder
        os.makedirs(self.folder, exist_ok=True)
        self._used = os.open(f"{self.folder}/used", os.O_RDWR | os.O_CREAT, 0o666)
        self._lock, self._silent_until, self._reserved = threading.RLock(), 0.0, 0
        with self._locked():
            path = Path(self.folder, "node")
            self.node = path.read_text(errors="replace") if path.is_file() else ""
            if not _NODE.fullmatch(self.node):  # a full disk or a killed process may have left it empty
                self.node = secrets.token_hex(8)
                path.write_text(self.node)
        disk = shutil.disk_usage(self.folder)
        free = disk.free - int(MARGIN * disk.total)
        self.limit = max(0, self.used + free) if option.size is None else option.size
        self._share = min(_SHARE, self.limit >> 12)

    @property
    def used(self) -> int:
        """The bytes of all entries."""
        return int.from_bytes(os.pread(self._used, 8, 0), "little", signed=True)

    def _set_used(self, size: int) -> None:
        os.pwrite(self._used, size.to_bytes(8, "little", signed=True), 0)

    def count(self) -> dict[str, int]:
        """Count the bytes of each bucket's entries again: a killed process may have left the counter behind.

        Others write meanwhile: their newer entries are left out of the scan, as the counter grows by them.
        """
        sizes: dict[str, int] = {}
        began, used = time.time(), self.used
        for bucket in os.scandir(self.folder):
            if bucket.is_dir():
                entries = glob.iglob(f"{glob.escape(bucket.path)}/[0-9a-f][0-9a-f]/*")
                sizes[bucket.name] = sum(_size(entry, began) for entry in entries)
        with self._locked():
            self._set_used(sum(sizes.values()) + self.used - used)
        return sizes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._used, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._used, fcntl.LOCK_UN)

    def _reserve(self, size: int) -> bool:
        """Return whether there is room for so many bytes. They are taken for many entries at once: the lock is slow."""
        with self._lock:
            if self._reserved < size:
                if self.used + size > self.limit:
                    return False
                with self._locked():
                    taken = min(max(self._share, size), self.limit - self.used)
                    if taken < size:
                        return False
                    self._set_used(self.used + taken)
                self._reserved += taken
            self._reserved -= size
        return True

    def read(self, bucket: str, key: bytes) -> memoryview | None:
        """Return the content of an entry; None if there is none, or a damaged one, which is removed."""
        path = entry_path(self.folder, bucket, key)
        try:
            with open(path, "rb", buffering=0) as file:
                raw = file.read()
        except OSError:
            return None
        content = checked(key, memoryview(raw))
        if content is None:
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._reserve(-len(raw))
        return content

    def write(self, bucket: str, key: bytes, content: memoryview) -> None:
        """Write an entry, if there is room for it and it is not there."""
        path = entry_path(self.folder, bucket, key)
        if os.path.exists(path):
            return
        size = content.nbytes + HASH_BYTES
        if self._is_silent() or not self._reserve(size):
            return
        partial = f"{path}.{os.getpid()}-{threading.get_ident()}"
        try:
            if not os.path.isdir(folder := os.path.dirname(path)):
                os.makedirs(folder, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(content)
                file.write(hash_of(key, content))
            os.rename(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            self._reserve(-size)
            with self._lock:
                is_known, self._silent_until = self._is_silent(), time.monotonic() + _FULL_PAUSE
            if not is_known:
                text = "--cache %s takes no more for now, since it cannot be written: %s"
                _log.warning(text, self.folder, error.strerror)

    def _is_silent(self) -> bool:
        return time.monotonic() < self._silent_until

    def groups(self, nodes: Sequence[str] | None = None) -> list[list[str]]:
        """Return the nodes of earlier worker groups, the newest last; those given are recorded as one."""
        path = Path(self.folder, "groups")
        try:
            earlier: list[list[str]] = json.loads(path.read_bytes())
        except (OSError, ValueError):
            earlier = []
        if nodes is not None and [*nodes] not in earlier[-1:]:
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps([*(past for past in earlier if past != [*nodes]), [*nodes]][-_GROUPS_KEPT:]))
            partial.rename(path)
        return earlier


def _size(path: str, began: float) -> int:
    """Return the size of a file; 0 if it is newer, or was renamed or removed, as what killed processes left."""
    try:
        stat = os.stat(path)
        if "." in os.path.basename(path) and stat.st_mtime < time.time() - ABANDONED_AFTER_SECONDS:
            os.unlink(path)
            return 0
        return stat.st_size if stat.st_mtime <= began else 0
    except OSError:
        return 0


def hash_of(key: bytes, content: memoryview) -> bytes:
    """Return the hash at an entry's end: an entry under another's name does not have it either."""
    hashed = sha256(key)  # processors have instructions for it
    hashed.update(content)
    return hashed.digest()[:HASH_BYTES]


def checked(key: bytes, raw: memoryview) -> memoryview | None:
    """Return the content of an entry; None if it is not what was written."""
    content = raw[:-HASH_BYTES]
    if raw.nbytes >= HASH_BYTES and hash_of(key, content) == raw[-HASH_BYTES:]:
        return content
    COUNTS.add(damaged=1)
    return None


def entry_path(folder: str, bucket: str, key: bytes) -> str:
    """Return where an entry lies."""
    name = key.hex()
    return f"{folder}/{bucket}/{name[:2]}/{name[2:]}"
