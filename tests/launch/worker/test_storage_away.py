"""A storage that does not answer for a while: what workers do meanwhile, and what they say when it lasts."""

import errno
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import Config, Data, train
from raydali.data.builtin.digits import digits_folder
from raydali.data.read import reading
from raydali.data.stream.stream import Stream
from raydali.errors import DataError, DivergedError, StorageAway, StorageError, UsageError
from raydali.launch.worker.run_worker import worker_error
from raydali.run.folder import RunFolder
from tests.support.checkpoint_stores import Rows, newest, save, store_of
from tests.support.digits import SHORT, digits_data
from tests.support.failing_disk import FailingDisk, failing_disk
from tests.support.object_stores import FlakyS3
from tests.support.ranks import LocalSession, folder_of, run_ranks
from tests.support.traces import assert_whole


@pytest.mark.parametrize(
    ("error", "final", "storage"),
    [
        (StorageAway("away"), False, True),
        (StorageError("full"), True, False),
        (DataError("broken"), True, False),
        (DivergedError("nan"), True, False),
        (UsageError("asked"), True, False),
        (RuntimeError("bug"), False, False),
    ],
)
def test_the_driver_is_told_whether_the_storage_is_away(error: Exception, final: bool, storage: bool) -> None:
    try:
        raise error
    except Exception as raised:
        described = worker_error(raised, rank=0, step=0, group="", node_id="")
    assert str(error) in described.error
    assert (described.final, described.storage) == (final, storage)
    assert described.usage is isinstance(error, UsageError)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[RunFolder, FailingDisk]]:
    """A run with three checkpoints on a file server that can fail."""
    save(folder_of(tmp_path / "runs"), 5, 10, 15)
    with failing_disk(tmp_path / "runs", tmp_path / "seen") as disk:
        yield RunFolder(str(disk.path), "run"), disk


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_checkpoints_are_read_after_the_file_server_recovers(saved: tuple[RunFolder, FailingDisk], number: int) -> None:
    folder, disk = saved
    told, warnings = Rows(), list[str]()
    disk.fail(number, seconds=0.8)
    assert newest(replace(folder, warn=warnings.append), told) == 15
    assert told == [] and len(warnings) == 1 and os.strerror(number) in warnings[0]


def test_a_checkpoint_that_cannot_be_read_now_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that can be written to, unlike the failing one."""
    monkeypatch.setattr(reading, "SECONDS", 0.5)
    folder, read = folder_of(tmp_path), RunFolder.read
    save(folder, 5, 10)

    def failing(self: RunFolder, file: str) -> bytes:
        def call() -> bytes:
            if file == "checkpoint_000000010/state.pt":
                raise OSError(errno.ESTALE, "Stale file handle", self.path(file))
            return read(self, file)

        return self._with_retry(call)

    monkeypatch.setattr(RunFolder, "read", failing)
    told = Rows()
    with pytest.raises(StorageAway, match="Stale file handle"):
        store_of(folder, told).newest()
    monkeypatch.setattr(RunFolder, "read", read)
    assert told == [] and newest(folder) == 10


def test_what_a_resume_reads_beside_the_checkpoint_waits_too(
    saved: tuple[RunFolder, FailingDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk = saved
    disk.fail(errno.ESTALE, seconds=0.8)
    with folder.must_answer():
        assert folder.rows("epochs.jsonl") == []
    monkeypatch.setattr(reading, "SECONDS", 0.5)
    disk.fail(errno.ESTALE)
    with pytest.raises(StorageAway, match="Stale file handle"), folder.must_answer():
        folder.rows("epochs.jsonl")
    disk.fail()
    with pytest.raises(FileNotFoundError), folder.must_answer():
        folder.read("epochs.jsonl")


def newest_of(folder: RunFolder) -> str:
    reading.SECONDS = 0.5
    try:
        return str(LocalSession(folder).checkpoints.newest())
    except StorageAway as away:
        return str(away)


def test_all_ranks_report_the_same_of_a_dead_file_server(saved: tuple[RunFolder, FailingDisk]) -> None:
    folder, disk = saved
    disk.fail(errno.EIO)
    first, second = run_ranks(2, newest_of, folder)
    assert first == second and str(folder) in first and "Input/output error" in first


@pytest.mark.parametrize("seconds", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.3, 6, 20))])
@pytest.mark.slow
def test_checkpoints_are_read_once_a_busy_store_answers_again(flaky_s3: FlakyS3, seconds: float) -> None:
    folder = RunFolder("s3://bucket/runs", "run")
    folder.create()
    save(folder, 5, 10)
    urllib.request.urlopen(f"{flaky_s3.url}/_busy/{seconds}").close()
    told = Rows()
    assert newest(folder, told) == 10 and told == [] and flaky_s3.refused


class AwayAt(LocalSession):
    """Takes the data's file server away at a step, for so many seconds."""

    def __init__(self, folder: RunFolder, disk: FailingDisk, step: int, seconds: float) -> None:
        super().__init__(folder)
        self._disk, self._step, self._seconds = disk, step, seconds

    def report_progress(self, stream: Stream) -> None:
        if self.cursor.done == self._step and self.worker.rank == 0:
            self._disk.fail(errno.ESTALE, seconds=self._seconds)


def train_meanwhile(config: Config, data: Data, folder: RunFolder, disk: FailingDisk) -> list[dict[str, Any]]:
    session = AwayAt(folder, disk, step=3, seconds=1.5)
    train(config, data, session)
    session.checkpoints.finish()
    return session.rows


@pytest.mark.slow
def test_training_waits_for_its_data_and_says_so_in_one_event(tmp_path: Path) -> None:
    with failing_disk(Path(digits_folder()), tmp_path / "seen") as disk:
        config, data = replace(SHORT, data=str(disk.path), epochs=1), digits_data(disk.path)
        folder = folder_of(tmp_path)
        rows, of_other = run_ranks(2, train_meanwhile, config, data, folder, disk)
        events = [row for row in rows if row["event"] not in ("start", "rehearsal", "checkpoint")]
        assert {event["event"] for event in events} == {"storage retry"}, events
        assert all(event["path"] == f"{disk.path}/train" and event["ranks"] for event in events)
        assert sum(event["waited_seconds"] for event in events) > 0.3
        assert [row["event"] for row in of_other] == ["start"]
        assert_whole(folder, config.stream(len(data.train)))
