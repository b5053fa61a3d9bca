"""Leaks of a run on a machine: ports in use, and shared memory that no process uses.

Both are read from /proc: psutil only finds the sockets of its own network namespace, and lists mapped files slowly.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_LISTENING = "0A"


def listening(table: str) -> set[tuple[int, str]]:
    """Return port and inode of each listening socket in a table with the format of /proc/net/tcp."""
    rows = (line.split() for line in table.splitlines())
    return {(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if len(row) > 9 and row[3] == _LISTENING}


def ports_of(groups: Iterable[Iterable[psutil.Process]]) -> set[int]:
    """Return the TCP ports on which these processes listen, each in its own network namespace."""
    found: set[int] = set()
    for process in (process for group in groups for process in group):
        with suppress(OSError):
            folder = Path(f"/proc/{process.pid}")
            mine = set(_open_files(folder))
            for table in ("tcp", "tcp6"):
                sockets = listening((folder / "net" / table).read_text())
                found |= {port for port, inode in sockets if f"socket:[{inode}]" in mine}
    return found


def shared_memory() -> set[str]:
    """Return the names of this user's files in shared memory that no living process has mapped or opened."""
    with suppress(FileNotFoundError):
        files = {file.name for file in SHARED_MEMORY.iterdir() if file.lstat().st_uid == os.getuid()}
        unused = files - _in_use() if files else files
        return {name for name in unused if (SHARED_MEMORY / name).exists()}  # others were deleted meanwhile
    return set()


def _in_use() -> set[str]:
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            rows = process.joinpath("maps").read_text(errors="replace").splitlines()
            targets = [row.split(maxsplit=5)[-1] for row in rows if f" {SHARED_MEMORY}/" in row]
            targets += _open_files(process)
            names |= {Path(target).name for target in targets if target.startswith(f"{SHARED_MEMORY}/")}
    return names


def _open_files(process: Path) -> list[str]:
    """Return the targets of a process's file descriptors; none if it may not be inspected."""
    found = []
    with suppress(OSError):
        for link in process.joinpath("fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(link.readlink()))
    return found
