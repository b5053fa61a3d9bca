"""A RAY_ADDRESS at which nobody answers is refused at once."""

import socket
import time

import pytest

from raydali.commands.doctor import nodes_of_cluster
from raydali.errors import UsageError
from raydali.launch.driver import ray_cluster
from raydali.launch.driver.ray_cluster import connect
from raydali.options.placement import PlacementOptions
from tests.support.messages import mentioning

ADDRESSES = ["127.0.0.1:1", "ray://127.0.0.1:1", "http://127.0.0.1:1", "127.0.0.1:65536", "host.invalid:6379", "head"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_nobody_listens_at_is_bad_usage(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(UsageError, match=mentioning(f"RAY_ADDRESS={address} unset")):
        connect(PlacementOptions(), print).__enter__()
    with pytest.raises(UsageError, match=mentioning(f"RAY_ADDRESS={address} unset")):
        nodes_of_cluster(None)
    assert time.monotonic() - began < 15


def test_a_host_that_drops_packets_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a listener does whose queue is full."""
    monkeypatch.setattr(ray_cluster, "ANSWER_SECONDS", 0.2)
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    with full, socket.create_connection(full.getsockname()):
        address = f"ray://127.0.0.1:{full.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UsageError, match=mentioning(f"RAY_ADDRESS={address} timed out")):
            connect(PlacementOptions(), print).__enter__()
