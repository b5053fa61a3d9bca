"""A validation that says nothing is warned of: one class, or what was trained on."""

import shutil
from pathlib import Path

import pytest

from raydali.data.sources.formats import train_and_val
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.validation_set import warn_of_overlap
from tests.support.messages import mentions
from tests.support.trees import grow

PICTURES = ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def sets(root: Path) -> Path:
    for split in ("train", "val"):
        grow(root / split, PICTURES)
        for path in (root / split).rglob("*.jpg"):
            path.write_bytes(path.read_bytes() * (1 + len(split)))
    return root


def test_sets_of_the_same_names_and_other_pictures_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = train_and_val(str(sets(tmp_path)))
    assert train.fingerprint == val.fingerprint
    assert said(caplog) == ""


@pytest.mark.parametrize("how", ["path", "link", "copy", "list"])
def test_the_same_samples_twice(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = sets(tmp_path)
    train, val = root / "train", root / "train"
    if how == "link":
        val = root / "linked"
        val.symlink_to(train)
    if how == "copy":
        val = shutil.copytree(train, root / "copied")
    if how == "list":
        train = val = root / "train.csv"
        train.write_text("".join(f"train/{name},{name[:3]}\n" for name in PICTURES))
    train_and_val(str(train), str(val))
    assert mentions(said(caplog), "3 validation training samples")


def test_a_validation_set_inside_of_the_training_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    val = grow(sets(tmp_path) / "train" / "cat" / "held-out", PICTURES)
    train_and_val(str(tmp_path / "train"), str(val))
    assert mentions(said(caplog), f"{val} training")


def test_one_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val"):
        grow(tmp_path / split, [f"cat/{split}.jpg"])
    train_and_val(str(tmp_path))
    assert mentions(said(caplog), "cat only class")


def test_pairs_that_are_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grow(tmp_path, ["img/1.png", "gt/1.png"])
    pairs = ImagePairs.scan(str(tmp_path), "img", "gt")
    warn_of_overlap(pairs, pairs)
    assert mentions(said(caplog), "1 validation training samples")
