"""A checkpoint that cannot be saved: what is reported, what stays the newest, and when the run ends."""

import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from raydali.data.read import reading
from raydali.errors import StorageAway, StorageError
from raydali.run import checkpoints
from raydali.run.checkpoints import MAX_FAILURES
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST, BestWeights
from raydali.training import checkpoint_file
from tests.support.checkpoint_stores import Rows, newest, save, state_of, store_of
from tests.support.disks import small_disk
from tests.support.messages import mentioning, mentions
from tests.support.ranks import folder_of


def test_a_full_disk_costs_the_checkpoints_made_meanwhile(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=2000) as disk:
        folder, rows = folder_of(disk.path), Rows()
        store = store_of(folder, rows)
        store.save(5, state_of(5, 50_000))
        store.wait()
        disk.fill(leave=100_000)  # less than a state
        for step in (10, 15):
            best = BestWeights({"weight": torch.full((3,), float(step))}, 0, "top1", 0.5) if step == 10 else None
            store.save(step, state_of(step, 50_000), best=best)
            store.wait()
        assert newest(folder) == 5 and folder.folders() == ["best", "checkpoint_000000005"]
        assert [(event["event"], event["step"], event["in_a_row"]) for event in rows] == [
            ("checkpoint failed", 10, 1),
            ("checkpoint failed", 15, 2),
        ]
        assert rows[0]["path"] == f"{folder}/checkpoint_000000010" and "No space left" in rows[0]["reason"]
        disk.clear()
        store.save(20, state_of(20, 50_000))
        store.finish()
        assert newest(folder) == 20 and len(rows) == 2
        assert safetensors.torch.load(folder.read(BEST))["weight"][0] == 10


def test_the_manifest_alone_does_not_fit(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=2000) as disk:
        folder, rows = folder_of(disk.path), Rows()
        save(folder, 5)
        disk.fill(leave=-(-len(checkpoint_file.serialize(state_of(10))) // 4096) * 4096)  # whole pages
        store = store_of(folder, rows)
        store.save(10, state_of(10))
        store.wait()
        assert newest(folder) == 5 and "No space left" in rows[0]["reason"]
        assert not folder.exists("checkpoint_000000010")
        store.save(15, state_of(15))
        store.wait()
        assert len(rows) == 2, "what failed to be saved has left room"


def test_a_disk_that_becomes_read_only_or_goes_and_comes_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=2000) as disk:
        folder, rows = folder_of(disk.path), Rows()
        store = store_of(folder, rows)
        store.save(5, state_of(5))
        store.wait()
        disk.read_only(True)
        store.save(10, state_of(10))
        store.wait()
        assert newest(folder) == 5 and "Read-only file system" in rows[0]["reason"]
        disk.read_only(False)
        store.save(15, state_of(15))
        store.wait()
        assert newest(folder) == 15
        disk.unmount()
        store.save(20, state_of(20))
        store.wait()
        assert mentions(rows[1]["reason"], "folder gone") and folder.path() in rows[1]["reason"]
        assert list(disk.path.iterdir()) == [], "written to the disk below"
        assert rows[1]["in_a_row"] == 1


def test_failures_in_a_row_end_the_run_once_they_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", kilobytes=2000) as disk:
        folder, rows = folder_of(disk.path), Rows()
        store = store_of(folder, rows)
        disk.read_only(True)
        for step in range(MAX_FAILURES + 5):  # however many, that was quick
            store.save(step, state_of(step))
        store.wait()
        assert [event["in_a_row"] for event in rows] == [*range(1, MAX_FAILURES + 6)]
        later = time.monotonic() + checkpoints.MAX_SECONDS
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(StorageError, match=mentioning("10 checkpoints 600 Read-only")):
            store.save(20, state_of(20))


def test_few_failures_do_not_end_it_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_SECONDS", 0.0)
    store = store_of(folder_of(tmp_path), rows := Rows())
    for step in range(MAX_FAILURES):
        store.save(step, state_of(step), save_error="[Errno 116] Stale file handle")
    assert len(rows) == MAX_FAILURES
    with pytest.raises(StorageAway, match="Stale file handle"):  # it may answer again: the run is not over
        store.save(20, state_of(20))


def test_the_last_one_is_tried_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", kilobytes=2000) as disk:
        warnings: list[str] = []

        def warn(text: str) -> None:
            warnings.append(text)
            disk.read_only(False)

        folder = RunFolder(str(disk.path), "run", warn)
        folder.create()
        store = store_of(folder)
        disk.read_only(True)
        store.save(5, state_of(5))
        store.finish()
        assert newest(folder) == 5
        assert len(warnings) == 1 and f"{folder} does not answer" in warnings[0]

        disk.read_only(True)
        monkeypatch.setattr(reading, "SECONDS", 1.0)
        stuck = RunFolder(str(disk.path), "run")
        store = store_of(stuck)
        store.save(10, state_of(10))
        with pytest.raises(StorageError, match=mentioning("last checkpoint Read-only")):
            store.finish()
        assert newest(stuck) == 5


def test_what_must_lie_before_a_checkpoint_holds_it_back(tmp_path: Path) -> None:
    folder, rows = folder_of(tmp_path), Rows()
    store = store_of(folder, rows)
    store.save(5, state_of(5), save_error="rows could not be written")
    assert store.newest() is None
    with pytest.raises(StorageError, match=mentioning("rows written")):
        store.finish()
    store.save(10, state_of(10))
    store.finish()
    assert newest(folder) == 10 and len(rows) == 1
