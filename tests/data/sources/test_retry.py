"""Calls to a store that fails for a while, fails for good, or refuses."""

import errno
import time

import pytest

from raydali.data.sources import reading
from raydali.run.folder import RunFolder
from tests.support.object_stores import FlakyS3


def test_files_are_written_and_read_after_the_store_recovers(flaky_s3: FlakyS3) -> None:
    """The 30 tries of pyarrow take 6 s; after them ours begin, each with a warning."""
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        flaky_s3.busy = False

    folder = RunFolder("s3://bucket/runs", "run", warn)
    folder.create()
    folder.append("epochs.jsonl", {"epoch": 0})
    assert not warnings
    flaky_s3.busy = True
    folder.write("checkpoint_000000001/state.pt", bytes(6_000_000))
    assert len(warnings) == 1
    assert "s3://bucket/runs/run" in warnings[0] and "SLOW_DOWN" in warnings[0]
    assert folder.read("checkpoint_000000001/state.pt") == bytes(6_000_000)


@pytest.mark.slow
def test_a_store_that_is_killed_and_started_again(flaky_s3: FlakyS3) -> None:
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        flaky_s3.start()

    folder = RunFolder("s3://bucket/runs", "run", warn)
    folder.create()
    folder.append("epochs.jsonl", {"epoch": 0})
    flaky_s3.stop()
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [0]
    assert len(warnings) == 1 and "NETWORK_CONNECTION" in warnings[0]


@pytest.mark.usefixtures("flaky_s3")
def test_what_is_refused_or_missing_is_not_tried_again() -> None:
    warnings: list[str] = []
    folder = RunFolder("s3://bucket/runs", "run", warnings.append)
    with pytest.raises(FileNotFoundError):
        folder.read("nothing")
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        RunFolder("s3://no-such-bucket/runs", "run", warnings.append).write("file", b"")
    assert warnings == []


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("AWS Error SLOW_DOWN during PutObject operation: Please reduce your request rate. (HTTP status 503)", True),
        ("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 7, Couldn't connect to server", True),
        ("AWS Error UNKNOWN (HTTP status 500) during GetObject operation", True),
        ("AWS Error UNKNOWN (HTTP status 429) during GetObject operation", True),
        ("AWS Error ACCESS_DENIED during PutObject operation: Access Denied", False),
        ("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation: No response body.", False),
        ("AWS Error NO_SUCH_BUCKET during PutObject operation: The specified bucket does not exist", False),
    ],
)
def test_errors_in_passing_are_told_from_others(text: str, again: bool) -> None:
    assert reading.is_transient(OSError(text)) is again


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), True),
        (OSError("[Errno 116] Error reading bytes from file. Detail: Stale file handle"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (ValueError("no error of a storage"), False),
    ],
)
def test_errors_of_disks_and_file_servers(error: Exception, again: bool) -> None:
    assert reading.is_transient(error) is again


def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise OSError("AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    warnings: list[str] = []
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        reading.with_retry(fail, "a store", warnings.append)
    assert 40 < sum(pauses) <= reading.SECONDS and max(pauses) <= reading.LONGEST_PAUSE
    assert pauses[:4] == sorted(pauses[:4]) and pauses[0] <= reading.FIRST_PAUSE
    assert len(warnings) == 1 and len(pauses) < 12
