"""Timers of what a loader waits for, and calls to a store that fails for a while, fails for good, or refuses."""

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn

from raydali.data.load.make import make_loader
from raydali.data.read import reading
from raydali.data.read.reading import timed
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import ValidationImages
from raydali.data.tasks.pipeline import Inputs
from raydali.run.folder import RunFolder
from tests.support.object_stores import FlakyS3
from tests.support.pictures import encoded, files, one_batch, photograph


def test_time_inside_another_cause_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("raydali.data.read.reading.time.perf_counter", lambda: now[0])
    waits = reading.WaitTimer()
    with waits.by(lambda seconds: {"cpu decode": seconds / 4, "python": seconds * 3 / 4}):
        now[0] += 1.0
        with waits.on("storage"):
            now[0] += 2.0
            with waits.on("python"):
                now[0] += 4.0
        now[0] += 3.0
    assert waits.seconds == {"python": 4.0 + 3.0, "storage": 2.0, "cpu decode": 1.0}


def test_an_end_of_data_passes_through() -> None:
    waits = reading.WaitTimer()
    with pytest.raises(StopIteration), waits.on("storage"):
        raise StopIteration
    assert waits.seconds["storage"] >= 0


def test_reading_adds_up() -> None:
    before, began = reading.reading_seconds(), time.perf_counter()
    for _ in range(2):
        with reading.reading():
            time.sleep(0.02)
    whole = time.perf_counter() - began
    assert 0.04 <= reading.reading_seconds() - before <= whole


def test_python_time_counts_computation_and_not_waits() -> None:
    python, began = reading.PythonTime(), time.thread_time()
    with python.running():
        time.sleep(0.1)
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
    assert 0.1 <= python.seconds <= time.thread_time() - began


class SlowInputs(ValidationImages):
    def inputs(self, *args: Any) -> Inputs:
        for _ in range(10):
            late(None)
        return super().inputs(*args)


class SlowGraph(ValidationImages):
    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        return fn.python_function(images, function=timed(late), output_layouts="HWC"), labels


def late(image: Any) -> Any:
    time.sleep(0.02)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    return image


class Inverted(ValidationImages):
    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        table = np.arange(255, -1, -1, dtype=np.uint8)
        return fn.python_function(images, function=table.take, output_layouts="HWC"), labels


def test_a_function_may_be_of_no_module(tmp_path: Path) -> None:
    source = files(tmp_path, one=encoded(photograph(size=(64, 64))))
    images, inverted = (
        one_batch(kind(image_size=32, resize_size=32), source)[0] for kind in (ValidationImages, Inverted)
    )
    assert inverted.equal(255 - images)


@pytest.mark.parametrize(("kind", "calls"), [(SlowInputs, 3 * 4 * 10), (SlowGraph, 3 * 16)])
def test_slow_python_is_distinguished_from_decoding_and_reading(
    tmp_path: Path, kind: type[ValidationImages], calls: int
) -> None:
    source = files(tmp_path, **{f"image{i}": encoded(photograph(size=(64, 64))) for i in range(16)})
    order = OrderedPass(samples=16, batch_size=4)
    with make_loader("dali", source, kind(image_size=32, resize_size=32), order, threads=1) as loader:
        began, before = time.perf_counter(), loader.python.seconds
        for _ in range(3):
            for _ in loader:
                pass
        waits, whole = loader.waits.seconds, time.perf_counter() - began
        computed = loader.python.seconds - before
    assert sum(waits.values()) == pytest.approx(whole, rel=0.5)
    assert waits["python"] > 0.5 * sum(waits.values())
    assert computed == pytest.approx(calls * 0.01, rel=0.5)


@pytest.mark.slow
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
