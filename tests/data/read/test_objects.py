"""Objects read in other processes: contents, counts and errors are the same, and a killed process costs nothing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydali.data.read import objects
from raydali.data.read.objects import read_objects, through_cache
from raydali.data.read.read_counts import COUNTS
from raydali.data.read.storage import ObjectPart
from tests.data.read.test_node_cache import group
from tests.support.messages import mentions
from tests.support.object_stores import PutObjects
from tests.support.trees import bytes_of

CONTENTS = {f"{i:03}.jpg": bytes([i]) * (1000 * i) for i in range(40)}
PARTS = [ObjectPart(f"s3://apart/{name}") for name in CONTENTS]


@pytest.fixture(autouse=True)
def in_processes(s3: PutObjects, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    s3("apart", CONTENTS)
    monkeypatch.setattr(objects, "usable_cores", lambda: 3 * min(objects._PROCESSES) // 2)
    COUNTS.take()
    yield
    if started := objects._started.pop(objects._key(), None):
        started.close()


def contents(parts: list[ObjectPart]) -> list[bytes]:
    return bytes_of(read_objects(parts))


def readers() -> set[int]:
    """The processes that read now."""
    started = objects._started.get(objects._key())
    return {each._process.pid for each in started._all if each._process} if started else set()


@pytest.mark.slow
def test_contents_counts_and_errors_are_those_of_one_process() -> None:
    assert contents(PARTS) == [*CONTENTS.values()]
    assert readers()
    counts = COUNTS.take()
    assert (counts.requests, counts.bytes) == (40, sum(map(len, CONTENTS.values())))
    parts = [ObjectPart(uri, 1, 10) for uri, *_ in PARTS[1:]]
    assert contents(parts) == [content[1:11] for content in [*CONTENTS.values()][1:]]
    *_, error = read_objects([*PARTS, ObjectPart("s3://apart/gone.jpg")])
    assert isinstance(error, FileNotFoundError) and mentions(str(error), "s3://apart/gone.jpg")


@pytest.mark.slow
def test_the_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert contents(PARTS) == [*CONTENTS.values()]
    assert not readers()
    monkeypatch.setattr(objects, "usable_cores", lambda: 4 * min(objects._PROCESSES))
    assert contents(PARTS) == [*CONTENTS.values()]
    assert len(readers()) == 16 * 2 // 3 // 2


@pytest.mark.slow
def test_killed_processes_are_replaced() -> None:
    read_objects(PARTS)
    killed = readers()
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert contents(PARTS) == [*CONTENTS.values()]
    assert contents(PARTS) == [*CONTENTS.values()]
    assert readers() - killed


@pytest.mark.slow
def test_they_read_through_the_cache_and_make_their_copies_at_the_end(tmp_path: Path) -> None:
    with group([tmp_path / "a", tmp_path / "b"], 10**8) as (one, other):
        with through_cache(one.make):
            assert contents(PARTS) == [*CONTENTS.values()]
            assert COUNTS.take().requests == 40
        assert not readers()
        with through_cache(other.make):
            assert contents(PARTS) == [*CONTENTS.values()]
            counts = COUNTS.take()
        assert counts.requests == 0 and counts.hits + counts.peer_hits == 40 and counts.hits and counts.peer_hits


@pytest.mark.slow
def test_what_they_warn_of_is_said_here_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/s3-apart.unversioned").write_text("where a folder of entries has to be")
    with group([tmp_path / "a"], 10**8) as (node,), through_cache(node.make):
        assert contents(PARTS) == contents(PARTS) == [*CONTENTS.values()]
    (warning,) = [each.getMessage() for each in caplog.records if "--cache" in each.getMessage()]
    assert "cannot be written" in warning and str(tmp_path) in warning
