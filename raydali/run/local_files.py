"""Durable writes to local files: after a crash at any time, a file has its old contents or the new ones."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"
"""A part of the names of files that are being written."""


def replace(path: Path, contents: bytes | memoryview) -> None:
    """Write a whole file. Readers see the old contents or the new contents, never a part."""
    with partial_file(path) as partial:
        _write(partial, contents)
        partial.replace(path)
    _sync_folder(path.parent)


def create(path: Path, contents: bytes) -> None:
    """Write a whole file that must not exist yet.

    Raises:
        FileExistsError: the file exists.
    """
    with partial_file(path) as partial:
        _write(partial, contents)
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with path.open("xb") as stream:
                stream.write(contents)
    _sync_folder(path.parent)


def append(path: Path, contents: bytes) -> None:
    """Append to a file, or create it. If this fails, the file keeps its length."""
    # Unbuffered: after an error, closing a buffered file would write again.
    with path.open("ab", buffering=0) as stream:
        length, rest = os.fstat(stream.fileno()).st_size, memoryview(contents)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), length)
            raise


def ends_with_newline(path: Path) -> bool:
    """Return whether a file exists and its last line is complete."""
    with suppress(FileNotFoundError), path.open("rb") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            return stream.read() == b"\n"
    return False


def make_parent(path: Path, root: Path) -> None:
    """Make the folder of a file, but never `root`: if its disk was unmounted, the file would be on the wrong disk.

    Raises:
        FileNotFoundError: `root` does not exist.
    """
    parent = path.parent
    if not parent.is_dir():
        if not root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "The folder of the run is gone", str(root))
        parent.mkdir(parents=True, exist_ok=True)
        _sync_folder(parent.parent)


def remove_partial(root: Path) -> None:
    """Remove files that killed processes have not completed; errors are ignored.

    A process that still writes one of them gets an error.
    """
    for path in root.rglob(f"*{PARTIAL}*"):
        with suppress(OSError):
            path.unlink()


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Give a temporary name for a file, and remove this file at the end: it must not fill a full disk.

    The caller gives the file its name, `path`, when it is written.
    """
    # Processes of two containers may have the same id.
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield partial
    finally:
        with suppress(OSError):
            partial.unlink()


def _write(path: Path, contents: bytes | memoryview) -> None:
    with path.open("wb") as stream:
        stream.write(contents)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
