"""Fresh run, resume or done: what the run's folder says, and what a resume may not change."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import DIGITS, JOB, Config
from raydali.errors import UsageError
from raydali.launch.driver import launcher
from raydali.launch.driver.launcher import STREAM_SETTINGS, launch
from raydali.launch.driver.plan import with_largest_batch
from raydali.launch.driver.resume import PreviousRun, changes, check_unchanged, describe_changes, previous_run
from raydali.options.defaults import resolve
from raydali.options.every_job import PLACEMENT_OPTIONS
from raydali.report.console import Console
from raydali.run.folder import FORM, RunFolder
from tests.support.messages import mentioning, mentions
from tests.support.ranks import folder_of
from tests.support.trees import grow

SETTINGS: dict[str, Any] = {
    "form": FORM,
    "model": "resnet50",
    "seed": 0,
    "epochs": 90,
    "global_batch_size": 512,
    "workers": "2",
}
FIXED = ("model", "seed", "epochs", "global_batch_size")


def test_a_folder_without_settings_is_a_fresh_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert previous_run(folder) is None
    folder.append("events.jsonl", {"event": "start"})
    assert previous_run(folder) is None


@pytest.mark.parametrize(
    ("events", "finished", "early"),
    [
        ([], False, False),
        (["start"], False, False),
        (["start", "failure", "stop"], False, False),
        (["start", "interrupt", "finish"], True, False),
        (["start", "early end"], False, True),
        (["start", "early end", "resume"], False, False),
        (["start", "early end", "resume", "finish"], True, False),
    ],
)
def test_an_earlier_start_is_finished_or_not(tmp_path: Path, events: list[str], finished: bool, early: bool) -> None:
    folder = folder_of(tmp_path)
    folder.write_json("config.json", SETTINGS)
    for event in events:
        folder.append("events.jsonl", {"event": event})
    assert previous_run(folder) == PreviousRun(SETTINGS, finished, early)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"patience": 2}, "2 validations epoch 0 --patience"),
        ({"patience": 3, "stop_after": 3}, "--stop-after 3"),
        ({"patience": 3}, None),
        ({"stop_after": 4}, None),
        ({}, None),
    ],
)
def test_a_run_that_ended_early_says_so_at_once_or_goes_on(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limits: dict[str, Any],
    words: str | None,
) -> None:
    """It has three epochs, of which the first one was the best."""

    class GoesOn(Exception):  # noqa: N818
        pass

    def go_on(*_: Any) -> None:
        raise GoesOn

    monkeypatch.setattr(launcher, "connect", go_on)
    options = replace(DIGITS, storage=folder.uri_of_storage, name=folder.name, global_batch_size=64, patience=2)
    settings = launcher._settings(resolve(options, {}), JOB.open_data(options), None)
    folder.write_json("config.json", settings)
    folder.write_json("model.json", {"best": {"metric": "top1", "score": 0.9, "epoch": 0}})
    for epoch, score in enumerate((0.9, 0.8, 0.9)):
        folder.append("epochs.jsonl", {"epoch": epoch, "step": 23 * epoch, "validation": {"top1": score}})
    folder.append("events.jsonl", {"event": "early end", "why": "it was enough"})
    given = replace(replace(options, patience=None), **limits)
    if words is None:
        with pytest.raises(GoesOn):
            launch(JOB, given, Console())
    else:
        launch(JOB, given, Console())
    said = capsys.readouterr().out
    assert "changed setting" not in said
    assert mentions(said, f"{folder} {words}") if words else "ended early" not in said


def test_equal_or_irrelevant_settings_may_resume(tmp_path: Path) -> None:
    check_unchanged(folder_of(tmp_path), PreviousRun(SETTINGS, False), SETTINGS | {"workers": "7", "new": 1}, FIXED)


@pytest.mark.parametrize("now", ["/mnt/other:1T", None])
def test_a_resume_may_have_another_cache_or_none(tmp_path: Path, now: str | None) -> None:
    before = json.loads(json.dumps(asdict(DIGITS))) | {"cache": "/mnt/cache:500G"}
    check_unchanged(folder_of(tmp_path), PreviousRun(before, False), before | {"cache": now}, JOB.unchangeable(DIGITS))
    assert changes(PreviousRun(before, False), before | {"cache": now}, before.keys() - PLACEMENT_OPTIONS) == {}


def test_every_changed_setting_is_named_with_both_values(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    now = SETTINGS | {"model": "resnet18", "epochs": 100, "workers": "7"}
    with pytest.raises(UsageError) as error:
        check_unchanged(folder, PreviousRun(SETTINGS, False), now, FIXED)
    told = "model was 'resnet50', now 'resnet18'; epochs was 90, now 100"
    assert told in str(error.value) and mentions(str(error.value), f"{folder} --name")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"data": "/b", "samples": 1}, "/a 5 samples /b 1 sample; seed 0 1"),
        ({"data": "/a", "samples": 5}, "--data /a 5 samples names labels seed --name run-2"),
        ({"data": "/a", "samples": 4, "val_fraction": 0.2}, "--data /a 5 4 samples val_fraction None 0.2"),
        ({"data": "/a", "samples": 5, "label_column": "x", "multi_label": False}, "--data /a label_column None 'x'"),
        ({"data": None, "samples": 7}, "/a 5 samples built-in 7 samples; seed"),
    ],
)
def test_other_data_are_named_by_place_and_size(tmp_path: Path, now: dict[str, Any], words: str) -> None:
    was = SETTINGS | {"fingerprint": "85297afb", "data": "/a", "samples": 5}
    with pytest.raises(UsageError) as error:
        check_unchanged(
            folder_of(tmp_path),
            PreviousRun(was, False),
            SETTINGS | {"fingerprint": "fd35ee76", "seed": 1} | now,
            ("fingerprint", *FIXED),
        )
    assert mentions(str(error.value), words) and "fd35ee76" not in str(error.value)


def test_a_setting_unknown_to_the_earlier_start_is_a_change(tmp_path: Path) -> None:
    earlier = PreviousRun({name: value for name, value in SETTINGS.items() if name != "seed"}, False)
    with pytest.raises(UsageError, match=mentioning("seed None 0")):
        check_unchanged(folder_of(tmp_path), earlier, SETTINGS, FIXED)


def test_changes_are_told_as_json_keeps_them() -> None:
    earlier = PreviousRun({"area": [0.1, 1.0], "model": "a"}, finished=False)
    changed = changes(earlier, {"area": (0.1, 1.0), "model": "b"}, ["area", "model"])
    assert changed == {"model": ("a", "b")} and mentions("\n".join(describe_changes(changed)), "model 'a' 'b'")


def test_a_divided_micro_batch_is_told_with_what_changes() -> None:
    (line,) = describe_changes({"batch_size": (32, 16)})
    assert mentions(line, "batch_size 32 16 samples BatchNorm random") and "batch_size" not in STREAM_SETTINGS


def test_a_setting_that_is_newer_than_the_run_had_its_default(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.write_json("config.json", {"form": FORM, "model": "a"})
    earlier = previous_run(folder, {"model": "b", "area": (0.1, 1.0), "ratio": 1})
    assert earlier is not None
    changed = changes(earlier, {"model": "a", "area": (0.1, 1.0), "ratio": 2}, ["model", "area", "ratio"])
    assert changed == {"ratio": (1, 2)}


@pytest.mark.parametrize(
    ("contents", "what"), [(b"", "empty"), (b"{", "broken"), (b"[]", "broken"), (b"\xff", "broken")]
)
def test_settings_that_cannot_be_read_are_told_with_what_to_do(tmp_path: Path, contents: bytes, what: str) -> None:
    folder = folder_of(tmp_path)
    folder.write("config.json", contents)
    with pytest.raises(UsageError, match=mentioning(f"config.json {what} --name")):
        previous_run(folder)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"best/model.safetensors": "weights"}, "best/model.safetensors config.json"),
        (
            {"checkpoint_000000020/state.pt": "state", "checkpoint_000000020/manifest.json": "{}"},
            "checkpoint_000000020",
        ),
        ({"config.json": "{}", "events.jsonl": '{"event": "checkpoint", "step": 20}\n'}, "checkpoint_000000020"),
        ({"config.json": '{"batch_size": 64}', "best/model.safetensors": "weights"}, "best/model.safetensors"),
    ],
)
def test_what_is_no_run_that_can_go_on_is_refused_before_anything_is_written(
    folder: RunFolder, files: dict[str, str], named: str
) -> None:
    for name, contents in files.items():
        folder.write(name, contents.encode())
    options = replace(DIGITS, storage=folder.uri_of_storage, name=folder.name, seed=7)
    for start in (lambda: launch(JOB, options, Console()), lambda: with_largest_batch(JOB, options)):
        with pytest.raises(UsageError, match=mentioning(f"{folder} {named} --name")):
            start()
    assert {*folder.files(""), *folder.folders()} == {name.partition("/")[0] for name in files}
    assert {name: folder.read(name).decode() for name in files} == files


@pytest.mark.parametrize(("name", "was", "now"), [("fold", "1/5", "2/5"), ("val_group", None, r"/(\d)")])
def test_another_fold_or_group_is_refused(tmp_path: Path, name: str, was: str | None, now: str) -> None:
    paths = [f"{class_}/{i}.jpg" for class_ in ("cat", "dog") for i in range(40)]
    data = str(grow(tmp_path / "data", paths))
    options = Config(data=data, storage=str(tmp_path), name="run", model="digits", fold="1/5")
    before: dict[str, Any] = {name: was}
    after: dict[str, Any] = {name: now}
    earlier = replace(options, **before)
    facts = {"form": FORM, "samples": 64, "fingerprint": JOB.open_data(earlier).train.fingerprint}
    folder_of(tmp_path).write_json("config.json", asdict(earlier) | facts)
    with pytest.raises(UsageError, match=mentioning(f"{name} {was!r} {now!r} --name")):
        launch(JOB, replace(options, **after), Console())
