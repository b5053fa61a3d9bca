"""A small disk of its own, to be filled, made read-only and taken away while something writes to it."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, *, leave: int = 0) -> None:
        """Write until only so many bytes are free."""
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_bsize
        try:
            self._ballast.write_bytes(bytes(free - leave))
        except OSError as error:  # what else writes to it meanwhile has filled it
            assert error.errno == errno.ENOSPC

    def clear(self) -> None:
        self._ballast.unlink()

    def read_only(self, yes: bool) -> None:
        _run("mount", "-o", f"remount,{'ro' if yes else 'rw'}", self.path)

    def unmount(self) -> None:
        _run("umount", "--lazy", self.path)


@contextmanager
def small_disk(path: Path, *, kilobytes: int) -> Iterator[Disk]:
    """A tmpfs mounted at this path; the test is skipped where that is not permitted."""
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    disk = Disk(path)
    try:
        yield disk
    finally:
        if os.path.ismount(path):
            disk.unmount()


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
