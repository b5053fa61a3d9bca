"""A read-only view of a folder, as a file system of its own (FUSE), that can be made to fail as a file server does.

The server is this file, run as a program: a process that reads the kernel's requests from /dev/fuse.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, READDIR = 1, 2, 3, 14, 15, 18, 25, 26, 27, 28
RELEASEDIR, ACCESS, INTERRUPT, BATCH_FORGET = 29, 34, 36, 42
MS_NOSUID_NODEV_RDONLY = 7
FOPEN_DIRECT_IO = 1
HEADER = struct.Struct("<2I2Q")
"""Of a request: length, operation, its number, the node; 40 bytes with what is passed over."""


@dataclass(frozen=True)
class FailingDisk:
    path: Path
    control: Path

    def fail(self, number: int = 0, *, seconds: float = 0) -> None:
        """Answer each call with this errno from now on, for so many seconds (0: for good); 0: answer as usual."""
        partial = self.control.with_suffix(".partial")
        partial.write_text(f"{number} {seconds}")
        partial.replace(self.control)


@contextmanager
def failing_disk(root: Path, path: Path) -> Iterator[FailingDisk]:
    """`root`, seen at this path; the test is skipped where that is not permitted."""
    import pytest

    path.mkdir()
    disk = FailingDisk(path, path.with_suffix(".control"))
    disk.fail(0)
    command = [sys.executable, "-S", __file__, str(root), str(path), str(disk.control)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        said = server.stdout.readline()
        if said != "mounted\n":
            pytest.skip(f"no file system can be mounted here: {said}")
        yield disk
    finally:
        disk.fail(0)
        subprocess.run(["umount", "--lazy", path], capture_output=True)
        server.kill()
        server.wait()


class _Server:
    def __init__(self, root: str, control: str) -> None:
        self._paths, self._nodes = {1: root}, {root: 1}
        self._control = control
        self._changed, self._error, self._until = 0, 0, 0.0

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, 1 << 18)
            except OSError as error:
                if error.errno == errno.ENOENT:  # the request was taken back
                    continue
                return
            _, operation, number, node = HEADER.unpack_from(request)
            if operation in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            try:
                body, failed = self._answer(operation, node, request[40:]), 0
            except OSError as error:
                body, failed = b"", error.errno or errno.EIO
            os.write(device, struct.pack("<IiQ", 16 + len(body), -failed, number) + body)

    def _look_at_control(self) -> None:
        changed = Path(self._control).stat().st_mtime_ns
        if changed != self._changed:
            number, seconds = Path(self._control).read_text().split()
            self._changed, self._error = changed, int(number)
            self._until = time.monotonic() + float(seconds) if float(seconds) else float("inf")
        if self._error and time.monotonic() < self._until:
            raise OSError(self._error, "as told")

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            _, _, ahead, _ = struct.unpack_from("<4I", body)
            return struct.pack("<4I2H2I2H8I", 7, 31, ahead, 0, 12, 10, 1 << 17, 1, 32, 0, *[0] * 8)
        if operation in (RELEASE, RELEASEDIR, FLUSH, ACCESS):
            return b""
        self._look_at_control()
        path = self._paths[node]
        if operation == LOOKUP:
            child = f"{path}/{os.fsdecode(body.rstrip(bytes(1)))}"
            attributes = self._attributes(child)
            return struct.pack("<4Q2I", self._node(child), 0, 0, 0, 0, 0) + attributes
        if operation == GETATTR:
            return struct.pack("<Q2I", 0, 0, 0) + self._attributes(path)
        if operation in (OPEN, OPENDIR):
            return struct.pack("<Q2I", 0, FOPEN_DIRECT_IO, 0)  # no cache of the kernel's answers in our place
        _, offset, size = struct.unpack_from("<2QI", body)
        if operation == READ:
            with Path(path).open("rb") as file:
                return os.pread(file.fileno(), size, offset)
        if operation == READDIR:
            return self._entries(path, offset, size)
        raise OSError(errno.ENOSYS, "not there")

    def _entries(self, path: str, offset: int, size: int) -> bytes:
        entries = b""
        for place, entry_path in enumerate(sorted(Path(path).iterdir()), 1):
            raw = os.fsencode(entry_path.name)
            node = self._node(str(entry_path))
            entry = struct.pack("<2Q2I", node, place, len(raw), 0) + raw + bytes(-len(raw) % 8)
            if place > offset and len(entries) + len(entry) <= size:
                entries += entry
        return entries

    def _node(self, path: str) -> int:
        if path not in self._nodes:
            self._nodes[path] = len(self._nodes) + 1
            self._paths[self._nodes[path]] = path
        return self._nodes[path]

    def _attributes(self, path: str) -> bytes:
        found = os.lstat(path)
        times = int(found.st_atime), int(found.st_mtime), int(found.st_ctime)
        owner = found.st_mode, found.st_nlink, found.st_uid, found.st_gid
        return struct.pack(
            "<6Q10I", self._node(path), found.st_size, found.st_blocks, *times, 0, 0, 0, *owner, 0, 4096, 0
        )


def _main(root: str, path: str, control: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"failing", os.fsencode(path), b"fuse", MS_NOSUID_NODEV_RDONLY, options):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    _Server(root, control).serve(device)


if __name__ == "__main__":
    _main(*sys.argv[1:])
