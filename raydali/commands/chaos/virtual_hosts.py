"""Hosts on this machine, each with a cable that can be pulled out, and a disk that can be filled.

Hosts are network namespaces with addresses of their own, on a switch; root alone can make them. Other users' hosts are
this machine itself: they share its address and have no cable.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raydali.commands.chaos import leaks

LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        cable: the end of its cable that is in the switch; None where the host is this machine.
    """

    name: str
    address: str
    cable: str | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """That command, run on the host."""
        return [*(["ip", "netns", "exec", self.name] if self.cable else []), *command]

    def link(self, state: str) -> None:
        """Set its cable "down" or "up"."""
        assert self.cable is not None
        _run("ip", "link", "set", self.cable, state)

    def listening(self) -> set[int]:
        """The TCP ports at which anybody listens on it."""
        tables = self.command(["cat", "/proc/net/tcp", "/proc/net/tcp6"])
        text = subprocess.run(tables, capture_output=True, text=True).stdout
        return {port for port, _ in leaks.listening(text)}


def why_no_cables() -> str:
    """Why hosts cannot have networks of their own here; empty where they can."""
    if os.geteuid():
        return "network namespaces need root"
    return "" if shutil.which("ip") else "network namespaces need iproute2's `ip`"


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts; in namespaces where that can be."""
    if why_no_cables():
        yield [Host(f"node{i}", LOCAL) for i in range(number)]
        return
    mark = f"rc{os.getpid() % 100_000}"
    net = f"10.{150 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    made = [Host(f"{mark}-{i}", f"{net}.{i + 1}", f"{mark}v{i}") for i in range(number)]
    try:
        _run("ip", "link", "add", mark, "type", "bridge")
        _run("ip", "link", "set", mark, "up")
        for host in made:
            assert host.cable is not None
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", host.cable, "master", mark, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", mark], check=False, capture_output=True)


@dataclass(frozen=True)
class Disk:
    """A folder; on a disk of its own it can be filled."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        """Write until nothing is free, whoever else writes meanwhile."""
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**20))

    def clear(self) -> None:
        """Free again what was filled."""
        self._ballast.unlink(missing_ok=True)


def why_no_disk() -> str:
    """Why no disk can be mounted here; empty where one can."""
    return "mounting a small disk needs root" if os.geteuid() else ""


@contextmanager
def small_disk(path: Path, *, megabytes: int) -> Iterator[Disk]:
    """A tmpfs at this path, which is made; a plain folder where none can be mounted."""
    path.mkdir()
    if why_no_disk():
        yield Disk(path)
        return
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "raydali-chaos", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
