"""A run by its folder, or by its name in the usual storage."""

from pathlib import Path

import pytest

from raydali.errors import UsageError
from raydali.run.find import find_run
from tests.support.messages import mentioning


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("tuned", "pets"):
        (tmp_path / "raydali-runs" / name).mkdir(parents=True)
        (tmp_path / "raydali-runs" / name / "config.json").write_text("{}")
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
