"""Virtual hosts behind firewalls that open a few ports, and an address of this machine among them."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chaos.virtual_hosts import Host, namespaces_unavailable, virtual_hosts

EPHEMERAL = (40000, 60999)
"""The ports that a host's kernel gives out: torch's store and the connections between ranks."""


def require_hosts() -> None:
    """Skip the test where such hosts cannot be made."""
    if why_not := namespaces_unavailable():
        pytest.skip(why_not)
    if shutil.which("nft") is None:
        pytest.skip("firewalls need nftables' `nft`")


@contextmanager
def firewalled_hosts(number: int, ports: Sequence[str]) -> Iterator[tuple[list[Host], str]]:
    """Hosts on a switch, as many as `number`, and this machine's own address there.

    `ports` are those that a host opens to the others, as nftables writes them: "6379" or "10002-10999". All else that
    comes in is dropped but for answers, and what this machine itself sends.
    """
    low, high = EPHEMERAL
    with virtual_hosts(number) as made:
        here = join_switch(made)
        rules = f"""
            table inet firewall {{
                chain incoming {{
                    type filter hook input priority 0; policy drop;
                    iif lo accept
                    ct state established,related accept
                    ip saddr {here} accept
                    tcp dport {{ {", ".join(ports)} }} accept
                    counter
                }}
            }}"""
        for host in made:
            setting = f"echo {low} {high} > /proc/sys/net/ipv4/ip_local_port_range"
            subprocess.run(host.command(["sh", "-c", setting]), check=True)
            subprocess.run(host.command(["nft", "-f", "-"]), input=rules, text=True, check=True)
        yield made, here


def join_switch(made: Sequence[Host]) -> str:
    """Give this machine an address that these hosts reach, and return it."""
    here = f"{made[0].address.rpartition('.')[0]}.254"
    switch = Path(f"/sys/class/net/{made[0].veth}/master").resolve().name
    subprocess.run(["ip", "addr", "add", f"{here}/24", "dev", switch], check=True)
    return here
