"""A run by its folder, or by its name in the usual storage."""

from pathlib import Path
from typing import Any

import pytest

from raydali.errors import UsageError
from raydali.launch.driver.resume import previous_run
from raydali.run.find import find_run, look_at
from raydali.run.folder import FORM, RunFolder
from tests.support.messages import mentioning


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("tuned", "pets"):
        (tmp_path / "raydali-runs" / name).mkdir(parents=True)
        (tmp_path / "raydali-runs" / name / "config.json").write_text(f'{{"form": {FORM}}}')
    monkeypatch.chdir(tmp_path)
    return tmp_path / "raydali-runs"


def test_a_name_is_looked_for_in_the_usual_storage(storage: Path) -> None:
    assert find_run("tuned").path() == find_run(str(storage / "tuned")).path() == str(storage / "tuned")
    (storage.parent / "pets").mkdir()  # what is here counts, even if it is no run
    with pytest.raises(UsageError, match=mentioning("pets config.json")):
        find_run("pets")


def test_near_names_are_suggested(storage: Path) -> None:
    for given in ("tunde", str(storage / "tune")):
        with pytest.raises(UsageError, match=mentioning(f"{given} tuned")):
            find_run(given)


def test_what_is_no_run_is_not_suggested(storage: Path) -> None:
    (storage / "tuned2").mkdir()
    for given in ("tuned2", str(storage / "tuned2")):
        with pytest.raises(UsageError, match=mentioning(f"{given} config.json tuned")) as error:
            find_run(given)
        assert str(error.value).rpartition("give ")[2] == "tuned"


WEIGHTS, STATE, MANIFEST = (
    "best/model.safetensors",
    "checkpoint_000000040/state.pt",
    "checkpoint_000000040/manifest.json",
)
SAVED = [{"event": "start", "step": 0}, {"event": "checkpoint", "step": 20}]
"""Events of a run that has saved a checkpoint."""


@pytest.mark.parametrize(("settings", "what"), [({}, "no form"), ({"form": FORM + 1}, f"form {FORM + 1}")])
def test_a_run_of_another_form_is_refused(folder: RunFolder, settings: dict[str, int], what: str) -> None:
    folder.write_json("config.json", settings)
    for read in (lambda: find_run(str(folder)), lambda: previous_run(folder)):
        with pytest.raises(UsageError, match=mentioning(f"config.json has {what}, reads form {FORM}")):
            read()


@pytest.mark.parametrize(
    ("files", "events", "kind", "why"),
    [
        ([], [], "empty", ""),
        (["train.log"], [{"event": "start", "step": 0}], "empty", ""),
        ([WEIGHTS], [], "foreign", WEIGHTS),
        (["model.safetensors"], [], "foreign", "model.safetensors"),  # the copy of a folder best/
        ([STATE, MANIFEST], [], "foreign", "checkpoint_000000040"),
        ([STATE], [], "foreign", "checkpoint_000000040"),
        (["epochs.jsonl"], SAVED, "foreign", "checkpoint_000000020"),
        (["config.json"], [], "run", ""),
        (["config.json", STATE, "epochs.jsonl"], SAVED[:1], "run", ""),  # killed before its first checkpoint
        (["config.json", STATE, MANIFEST, WEIGHTS], SAVED, "run", ""),
        (["config.json", "checkpoint_000000040/refused.json"], [], "stuck", "checkpoint_000000040"),
        (["config.json", STATE, WEIGHTS], [], "stuck", WEIGHTS),
        (["config.json", STATE], SAVED, "stuck", "checkpoint_000000040"),
        (["config.json"], SAVED, "stuck", "checkpoint_000000020"),
        (["config.json", WEIGHTS], [*SAVED, {"event": "finish"}], "run", ""),
    ],
)
def test_what_a_folder_is(
    folder: RunFolder, files: list[str], events: list[dict[str, Any]], kind: str, why: str
) -> None:
    for file in files:
        folder.write(file, b'{"form": %d}' % FORM)
    for row in events:
        folder.append("events.jsonl", row)
    is_now, reason = look_at(folder)
    assert (is_now, why in reason, bool(reason)) == (kind, True, bool(why))
    if kind in ("run", "stuck"):
        assert find_run(str(folder)) == folder
        return
    with pytest.raises(UsageError, match=mentioning(why or "config.json")):
        find_run(str(folder))
