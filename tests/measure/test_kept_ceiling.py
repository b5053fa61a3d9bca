"""A ceiling that a node keeps: for the same conditions, for a day, and never in the way."""

import time
from pathlib import Path

import pytest

from raydali.measure.kept_ceiling import MAX_AGE, KeptCeiling


def test_it_is_found_under_the_same_conditions_only(tmp_path: Path) -> None:
    conditions = {"batch_size": "64", "hosts": ["a", "b"]}
    assert KeptCeiling.of(tmp_path, conditions).read() is None
    before = time.time()
    KeptCeiling.of(tmp_path, conditions).write(1234.5, 8e9)
    found = KeptCeiling.of(tmp_path, {"hosts": ["a", "b"], "batch_size": "64"}).read()
    assert found is not None and found.images_per_second == 1234.5 and before <= found.time <= time.time()
    assert found.flops_per_image == 8e9
    assert KeptCeiling.of(tmp_path, conditions | {"hosts": ["a", "c"]}).read() is None
    KeptCeiling.of(tmp_path, conditions).forget()
    assert KeptCeiling.of(tmp_path, conditions).read() is None


@pytest.mark.parametrize(("later", "kept"), [(MAX_AGE - 60, True), (MAX_AGE + 60, False), (-60, False)])
def test_it_is_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float, kept: bool) -> None:
    ceiling = KeptCeiling.of(tmp_path, {})
    ceiling.write(5.0, None)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + later)
    assert (ceiling.read() is not None) == kept


@pytest.mark.parametrize("contents", ["", "{}", "[1]", '{"images_per_second": null, "time": 1, "flops_per_image": 1}'])
def test_a_damaged_file_is_none(tmp_path: Path, contents: str) -> None:
    ceiling = KeptCeiling.of(tmp_path, {})
    ceiling.write(5.0, None)
    ceiling.file.write_text(contents)
    assert ceiling.read() is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ceiling = KeptCeiling.of(tmp_path / "file", {})
    ceiling.write(5.0, None)
    ceiling.forget()
    assert ceiling.read() is None
