"""Whose a run's folder is: of two drivers, or of a driver's worker groups, the older one writes nothing more."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydali.errors import SupersededError, UsageError
from raydali.launch.driver.launcher import _begin
from raydali.launch.driver.resume import PreviousRun
from raydali.report.html.live import LiveReport
from raydali.run.attempt import Attempt
from raydali.run.folder import RunFolder
from raydali.run.model_file import BestWeights
from raydali.run.sample_trace import drop_samples
from tests.support.checkpoint_stores import newest, save, state_of, store_of
from tests.support.messages import mentioning, mentions

SETTINGS = {"seed": 0}


def contents_of(folder: RunFolder) -> dict[str, bytes]:
    """All files, in sub-folders too."""
    folders = ["", *folder.folders()]
    files = [f"{each}/{file}".lstrip("/") for each in folders for file in folder.files(each)]
    return {file: folder.read(file) for file in files}


def group(folder: RunFolder, driver: str, number: int) -> RunFolder:
    attempt = Attempt(driver, number)
    attempt.take(folder)
    return attempt.fenced(folder)


def test_a_superseded_rank_0_changes_no_newer_checkpoint(folder: RunFolder) -> None:
    Attempt("driver").take(folder)
    older = group(folder, "driver", 1)
    save(older, 100)
    zombie = store_of(older)
    newer = group(folder, "driver", 2)
    newer.write("checkpoint_000000110/state.pt", b"half of it")  # which the older one would tidy away
    before = contents_of(folder)
    zombie.save(120, state_of(120), best=BestWeights(state_of(120)["state"]["model"], 1, "top1", 0.5))
    with pytest.raises(SupersededError, match=mentioning(f"newer workers {folder}")):
        zombie.finish()
    assert contents_of(folder) == before
    save(newer, 110)
    assert newest(newer) == 110


def test_a_failed_save_removes_nothing_of_newer_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    store = store_of(group(folder, "driver", 1))
    group(folder, "driver", 2).write("checkpoint_000000120/state.pt", b"half of it")
    before = contents_of(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write", full)
    store.save(120, state_of(120))
    store.wait()
    monkeypatch.undo()
    assert contents_of(folder) == before


CHANGES: list[Callable[[RunFolder], Any]] = [
    lambda folder: folder.append("epochs.jsonl", {"epoch": 1, "step": 9}),
    lambda folder: folder.append("events.jsonl", {"event": "finish"}),
    lambda folder: folder.keep_rows("epochs.jsonl", lambda row: False),
    lambda folder: drop_samples(folder, 0),
    lambda folder: folder.extend("tensorboard/events", b"more"),
    lambda folder: folder.write_json("config.json", {}),
    lambda folder: folder.rename("config.json", "other.json"),
    lambda folder: folder.remove("config.json"),
    lambda folder: folder.remove_folder("samples"),
    lambda folder: LiveReport(folder, print).event({"event": "finish"}),
]


@pytest.mark.parametrize("number", [0, 1], ids=["driver", "workers"])
def test_an_older_driver_and_its_workers_change_nothing_more(folder: RunFolder, number: int) -> None:
    older = group(folder, "older", number)
    older.write_json("config.json", SETTINGS)
    older.append("epochs.jsonl", {"epoch": 0, "step": 5})
    older.append("events.jsonl", {"event": "start"})
    older.write("samples/step-000000000-000000004-rank-00000.parquet", b"rows")
    Attempt("newer").take(folder)
    before = contents_of(folder)
    for change in CHANGES:
        with pytest.raises(SupersededError, match=mentioning(f"another driver {folder}")):
            change(older)
    assert contents_of(folder) == before
    assert older.rows("epochs.jsonl") == [{"epoch": 0, "step": 5}]


def test_older_drivers_and_workers_cannot_reclaim_the_folder(folder: RunFolder) -> None:
    Attempt("older").take(folder)
    group(folder, "older", 2)
    with pytest.raises(SupersededError):
        Attempt("older", 1).take(folder)
    group(folder, "older", 3).append("epochs.jsonl", {})
    Attempt("newer").take(folder)
    with pytest.raises(SupersededError):
        Attempt("older", 4).take(folder)
    group(folder, "newer", 1).append("epochs.jsonl", {})


def test_a_driver_goes_on_beside_its_own_workers(folder: RunFolder) -> None:
    driver = group(folder, "driver", 0)
    for number in (1, 2):
        group(folder, "driver", number).append("epochs.jsonl", {"epoch": number})
        driver.append("events.jsonl", {"group": number})
    assert len(driver.rows("events.jsonl")) == len(driver.rows("epochs.jsonl")) == 2


@pytest.mark.parametrize("contents", [None, b"", b"{", b"[]", b'{"driver": 7}'])
def test_an_attempt_that_cannot_be_read_hinders_nobody(folder: RunFolder, contents: bytes | None) -> None:
    ours = group(folder, "driver", 1)
    if contents is None:
        folder.remove("attempt.json")
    else:
        folder.write("attempt.json", contents)
    ours.append("epochs.jsonl", {"epoch": 0})


def test_of_two_drivers_that_begin_one_name_one_is_refused(tmp_path: Path) -> None:
    for number in range(20):
        folder = RunFolder(str(tmp_path), f"run-{number}")
        folder.create()
        began, refused = [], []
        both = threading.Barrier(2)

        def begin(folder: RunFolder = folder, both: threading.Barrier = both) -> None:
            attempt = Attempt()
            both.wait()
            try:
                _begin(folder, attempt, None, {"driver": attempt.driver}, {}).append("events.jsonl", {"event": "start"})
                began.append(attempt.driver)  # noqa: B023
            except UsageError as error:
                refused.append(str(error))  # noqa: B023

        threads = [threading.Thread(target=begin) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(began) == len(refused) == 1 and mentions(refused[0], "another driver begun")
        assert folder.read_json("config.json")["driver"] == folder.read_json("attempt.json")["driver"] == began[0]
        assert folder.files("") == ["attempt.json", "config.json", "events.jsonl"]


def test_a_driver_that_comes_a_moment_later_is_refused(folder: RunFolder) -> None:
    first = _begin(folder, Attempt(), None, SETTINGS, {})
    with pytest.raises(UsageError, match=mentioning("--name")):
        _begin(folder, Attempt(), None, SETTINGS, {})
    first.append("events.jsonl", {"event": "start"})


def test_settings_are_rewritten_with_an_event_if_they_changed(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    _begin(folder, Attempt(), None, {"size": 256, "workers": "1"}, {})
    written = Path(folder.path("config.json")).stat()
    earlier = PreviousRun({"size": 256, "workers": "1"}, finished=False)
    _begin(folder, Attempt(), earlier, {"size": 256, "workers": "1"}, {})
    assert Path(folder.path("config.json")).stat() == written
    assert not folder.exists("events.jsonl")
    _begin(folder, Attempt(), earlier, {"size": 32, "workers": "2"}, {"size": (256, 32)})
    assert folder.read_json("config.json") == {"size": 32, "workers": "2"}
    (event,) = folder.rows("events.jsonl")
    assert (event["event"], event["changed"]) == ("settings", {"size": [256, 32]})


def test_what_killed_writers_left_goes_at_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    for file in ("config.json", "best/model.safetensors"):
        folder.write_json(file, SETTINGS)
        Path(f"{folder.path(file)}.partial-4711").write_bytes(b"half")
        Path(f"{folder.path(file)}.partial-4711-0badcafe").write_bytes(b"half")
    _begin(folder, Attempt(), PreviousRun(SETTINGS, finished=False), SETTINGS, {})
    assert sorted(contents_of(folder)) == ["attempt.json", "best/model.safetensors", "config.json"]
