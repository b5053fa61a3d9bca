"""Virtual hosts on this machine, each with a network link that can be cut.

Hosts are network namespaces on a bridge, each with its own address. Only root can make them. Without root, all hosts
are this machine itself: they share its address, and their links cannot be cut.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

from tests.support.chaos import leaks

LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """A virtual host on this machine.

    Attributes:
        veth: the bridge's end of its veth pair; None if the host is this machine.
    """

    name: str
    address: str
    veth: str | None = None

    @property
    def interface(self) -> str:
        """The network interface with its address."""
        return "eth0" if self.veth else "lo"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs this command on the host."""
        return [*(["ip", "netns", "exec", self.name] if self.veth else []), *command]

    def set_link(self, state: str) -> None:
        """Set the host's link "down" or "up"."""
        assert self.veth is not None
        _run("ip", "link", "set", self.veth, state)

    def listening(self) -> set[int]:
        """Return the TCP ports on which any process of the host listens."""
        tables = self.command(["cat", "/proc/net/tcp", "/proc/net/tcp6"])
        text = subprocess.run(tables, capture_output=True, text=True).stdout
        return {port for port, _ in leaks.listening(text)}


def namespaces_unavailable() -> str:
    """Return why this process cannot make network namespaces; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    return "" if shutil.which("ip") else "network namespaces need iproute2's `ip`"


_LETTERS = cycle("abcdefghij")


@contextmanager
def virtual_hosts(number: int) -> Iterator[list[Host]]:
    """Make this number of hosts, in network namespaces if possible."""
    if namespaces_unavailable():
        yield [Host(f"node{i}", LOCAL) for i in range(number)]
        return
    mark = f"rc{os.getpid() % 100_000}{next(_LETTERS)}"  # links of a namespace that ends may stay for a moment
    net = f"10.{150 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    made = [Host(f"{mark}-{i}", f"{net}.{i + 1}", f"{mark}v{i}") for i in range(number)]
    try:
        _run("ip", "link", "add", mark, "type", "bridge")
        _run("ip", "link", "set", mark, "up")
        for host in made:
            assert host.veth is not None
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.veth, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", host.veth, "master", mark, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", mark], check=False, capture_output=True)


def tmpfs_unavailable() -> str:
    """Return why this process cannot mount a disk; empty if it can."""
    return "mounting a small disk needs root" if os.geteuid() else ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
