"""Notices of AWS and Google Cloud that a machine is taken away, from servers that answer as theirs do."""

import threading
import time
from collections.abc import Iterator

import pytest

from raydali import spot_notices
from raydali.spot_notices import CLOUDS, watch
from tests.support.messages import mentions
from tests.support.metadata_server import MetadataServer, metadata_server


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with metadata_server() as server:
        yield server


def test_a_notice_gives_the_time_of_the_end(cloud: str, server: MetadataServer) -> None:
    metadata = CLOUDS[cloud](server.url)
    assert metadata.deadline() is None
    ends = time.time() + 30
    server.announce(ends)
    for _ in range(2):  # again, if the node could not be drained at first
        deadline = metadata.deadline()
        assert deadline is not None and abs(deadline - ends) < 25


def test_google_s_server_answers_at_the_moment_of_the_notice(server: MetadataServer) -> None:
    metadata = CLOUDS["gcp"](server.url)
    assert metadata.deadline() is None
    found: list[float | None] = []
    waiting = threading.Thread(target=lambda: found.append(metadata.deadline()))
    waiting.start()
    server.announce(time.time() + 30)
    waiting.join(20)  # by itself it would wait 30 s
    assert found and found[0] is not None


def test_errors_are_logged_once_and_a_later_notice_is_found(
    cloud: str, server: MetadataServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spot_notices, "POLL_SECONDS", 0.01)
    server.failures = 3
    server.announce(time.time() + 30)
    refused = ["GCS does not answer", ""]
    drained: list[float] = []

    def drain(deadline: float) -> None:
        if why := refused.pop(0):
            raise RuntimeError(why)
        drained.append(deadline)

    watch(CLOUDS[cloud](server.url), lambda: True, drain)
    assert len(drained) == 1
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2 and mentions(warned[0], "HTTPError 503") and mentions(warned[1], "RuntimeError GCS")


def test_it_ends_with_the_node(cloud: str, server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = CLOUDS[cloud](server.url)
    monkeypatch.setattr(metadata, "pause", 0.01)
    monkeypatch.setattr(spot_notices, "GCP_POLL_SECONDS", 0)
    polls = iter([True, True, False])
    watch(metadata, lambda: next(polls), lambda _: pytest.fail("nothing was announced"))
