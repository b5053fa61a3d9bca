"""Hosts with cables, and disks that fill: made for real, where root runs the tests."""

import subprocess
import sys

import pytest

from tests.support.chaos.virtual_hosts import (
    Host,
    namespaces_unavailable,
    virtual_hosts,
)

SERVER = "import socket; s = socket.create_server(('', 5000)); print(flush=True)\nwhile True: s.accept()"
CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=1)"


@pytest.mark.skipif(bool(namespaces_unavailable()), reason="needs network namespaces")
def test_a_host_without_its_cable_is_reached_by_nobody() -> None:
    with virtual_hosts(2) as (first, second):
        server = subprocess.Popen(first.command([sys.executable, "-c", SERVER]), stdout=subprocess.PIPE)

        def reached(by: Host) -> bool:
            command = by.command([sys.executable, "-c", CLIENT, first.address])
            return subprocess.run(command, capture_output=True).returncode == 0

        try:
            assert server.stdout is not None and server.stdout.readline()
            assert first.listening() == {5000} and second.listening() == set()
            assert reached(second)
            first.set_link("down")
            assert not reached(second) and reached(first)
            first.set_link("up")
            assert reached(second)
        finally:
            server.kill()
            server.communicate()
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert first.name not in left and second.name not in left
