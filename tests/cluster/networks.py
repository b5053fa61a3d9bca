"""Hosts on this machine: network namespaces with addresses of their own, behind firewalls that open a few ports."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

EPHEMERAL = (40000, 60999)
"""The ports that a host's kernel gives out: torch's store and the connections between ranks."""


@dataclass(frozen=True)
class Host:
    """A network namespace: another host but for its files and its processors."""

    name: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """That command, run on the host."""
        return ["ip", "netns", "exec", self.name, *command]


def require_hosts() -> None:
    """Skip the test where such hosts cannot be made."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(f"hosts of their own need root, and iproute2 and nftables: missing {', '.join(missing) or 'root'}")


@contextmanager
def hosts(number: int, ports: Sequence[str]) -> Iterator[tuple[list[Host], str]]:
    """So many hosts on a switch, and this machine's own address there.

    Args:
        ports: those that a host opens to the others, as nftables writes them: "6379" or "10002-10999". All else that
            comes in is dropped but for answers, and what this machine itself sends.
    """
    mark = f"rd{os.getpid() % 100_000}"
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    made = [Host(f"{mark}-{i}", f"{net}.{i + 1}") for i in range(number)]
    try:
        _ip("link", "add", mark, "type", "bridge")
        _ip("addr", "add", f"{net}.254/24", "dev", mark)
        _ip("link", "set", mark, "up")
        for i, host in enumerate(made):
            _ip("netns", "add", host.name)
            _ip("link", "add", f"{mark}v{i}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", f"{mark}v{i}", "master", mark, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            low, high = EPHEMERAL
            setting = f"echo {low} {high} > /proc/sys/net/ipv4/ip_local_port_range"
            subprocess.run(host.command(["sh", "-c", setting]), check=True)
            rules = f"""
                table inet firewall {{
                    chain incoming {{
                        type filter hook input priority 0; policy drop;
                        iif lo accept
                        ct state established,related accept
                        ip saddr {net}.254 accept
                        tcp dport {{ {", ".join(ports)} }} accept
                        counter
                    }}
                }}"""
            subprocess.run(host.command(["nft", "-f", "-"]), input=rules, text=True, check=True)
        yield made, f"{net}.254"
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", mark], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
