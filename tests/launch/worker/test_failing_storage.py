"""Training on plain gloo processes while its storage fills up, goes read-only, or loses a checkpoint."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import Config, Data, train
from raydali.data.stream.stream import Stream
from raydali.run import checkpoints
from raydali.run.folder import RunFolder
from tests.support.digits import SHORT, digits_data, few_digits
from tests.support.disks import Disk, small_disk
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole

EVERY_2, EVERY_4 = (replace(SHORT, checkpoint_every=every) for every in (2, 4))


@pytest.fixture(scope="module")
def digits() -> Data:
    return digits_data()


class Disturbed(LocalSession):
    """Does something to the storage before some steps; rank 0 does, while the others wait for it in the step."""

    def __init__(self, folder: RunFolder, before: dict[int, Callable[[], None]]) -> None:
        super().__init__(folder)
        self._before = before

    def report_progress(self, stream: Stream) -> None:
        if self.cursor.done in self._before and self.worker.rank == 0:
            self._before[self.cursor.done]()
        self.worker.barrier()


def full_from_7_to_18(config: Config, data: Data, folder: RunFolder, disk: Disk) -> list[dict[str, Any]]:
    session = Disturbed(folder, {7: lambda: disk.fill(leave=0), 18: disk.clear})
    train(config, data, session)
    session.checkpoints.finish()
    return session.rows


def read_only_from_7(config: Config, data: Data, folder: RunFolder, disk: Disk) -> list[dict[str, Any]]:
    checkpoints.MAX_SECONDS = 0
    session = Disturbed(folder, {7: lambda: disk.read_only(True)})
    try:
        train(config, data, session)
        session.checkpoints.finish()
    finally:
        disk.read_only(False)
    return session.rows


def others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events that not every run has."""
    return [row for row in rows if row["event"] not in ("start", "rehearsal", "checkpoint")]


def assert_complete(folder: RunFolder, data: Data) -> None:
    """Each sample of the run once in the trace, each epoch once in its file."""
    assert_whole(folder, stream := SHORT.stream(len(data.train)))
    steps = [(row["epoch"], row["step"]) for row in folder.rows("epochs.jsonl")]
    assert steps == [(0, stream.end_step(0)), (1, stream.steps)]


@pytest.mark.slow
def test_training_goes_on_while_the_disk_is_full(tmp_path: Path, digits: Data) -> None:
    with small_disk(tmp_path / "disk", kilobytes=16_000) as disk:
        folder = folder_of(disk.path)
        failed = others(run_ranks(2, full_from_7_to_18, EVERY_4, digits, folder, disk)[0])
        assert [(event["event"], event["step"]) for event in failed] == [
            ("checkpoint failed", step) for step in (8, 12, 15, 16)
        ]
        assert all(os.strerror(errno.ENOSPC) in event["reason"] for event in failed)
        assert folder.folders()[-4:] == [
            "checkpoint_000000024",
            "checkpoint_000000028",
            "checkpoint_000000029",
            "samples",
        ]
        assert_complete(folder, digits)


@pytest.mark.slow
def test_a_read_only_disk_ends_the_run_and_a_repair_resumes_it(tmp_path: Path, digits: Data) -> None:
    with small_disk(tmp_path / "disk", kilobytes=16_000) as disk:
        folder = folder_of(disk.path)
        expected = r"StorageError: 5 checkpoints in a row could not be written.* to .*disk/run: .*Read-only file system"
        with pytest.raises(AssertionError, match=expected):
            run_ranks(2, read_only_from_7, EVERY_4, digits, folder, disk)
        assert folder.folders() == ["checkpoint_000000004", "samples"]
        assert resumed_at(folder, digits) == 4
        assert_complete(folder, digits)


def train_until(config: Config, data: Data, folder: RunFolder, stop_at: int | None = None) -> list[dict[str, Any]]:
    session = LocalSession(folder, stop_at=stop_at)
    train(config, data, session)
    session.checkpoints.finish()
    return session.rows


def resumed_at(folder: RunFolder, data: Data) -> int:
    rows = run_ranks(2, train_until, EVERY_4, data, folder)[0]
    return int(next(row["step"] for row in rows if row["event"] == "start"))


@pytest.mark.slow
def test_rows_after_the_resumed_checkpoint_are_rewritten(tmp_path: Path) -> None:
    """The newest, behind the first epoch's line, is broken: its epoch and its samples are done again."""
    folder, digits = folder_of(tmp_path), few_digits(tmp_path / "digits")
    with pytest.raises(Stopped):
        run_ranks(2, train_until, EVERY_2, digits, folder, 6)
    assert len(folder.rows("epochs.jsonl")) == 1
    folder.write("checkpoint_000000005/state.pt", b"lost")
    rows = run_ranks(2, train_until, EVERY_2, digits, folder)[0]
    bad = others(rows)[0]
    assert bad["event"] == "bad checkpoint" and bad["path"] == f"{folder}/checkpoint_000000005"
    assert next(row["step"] for row in rows if row["event"] == "start") == 4
    assert_complete(folder, digits)


def test_without_a_usable_checkpoint_all_ranks_report_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with pytest.raises(Stopped):
        run_ranks(2, train_until, EVERY_2, few_digits(tmp_path / "digits"), folder, 5)
    for name in folder.folders():
        if name.startswith("checkpoint"):
            folder.write(f"{name}/state.pt", b"lost")
    errors = run_ranks(2, error_of_newest, folder)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"no checkpoint in {folder} can be used (checkpoint_000000004, checkpoint_000000002; ")


def error_of_newest(folder: RunFolder) -> str:
    from raydali.errors import StorageError

    try:
        LocalSession(folder).checkpoints.newest()
    except StorageError as error:
        return str(error)
    return ""
