"""What names given as --data and --val-data stand for."""

from pathlib import Path

import pytest

from raydali.data.sources.formats import Kind, labeled_images, source_kind, train_and_val
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.trees import grow


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("train.csv", "list"),
        ("s3://bucket/train.TXT", "list"),
        ("s3://bucket/{0..9}.tar", "tar"),
        ("shards/*.tgz", "tar"),
        ("train-*-of-00010", "tfrecord"),
        ("a.tfrecord-00001", "tfrecord"),
        ("gs://bucket/imagenet", "folder"),
        ("nowhere", "folder"),
    ],
)
def test_a_name_tells_the_kind(data: str, kind: Kind) -> None:
    assert source_kind(data) == kind


def test_what_exists_counts_more_than_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert source_kind(str(tmp_path / "file")) == "list"
    for name in ("a.csv", "b.tar", "train-of-3"):
        (tmp_path / name).mkdir()
        assert source_kind(str(tmp_path / name)) == "folder"


def test_training_and_validation(tmp_path: Path) -> None:
    def write(text: str, name: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    grow(tmp_path, ["cat/1.jpg", "cat/2.jpg", "dog/a, b.jpg", "2.jpg"])
    train, val = write("cat/1.jpg\tcat\ndog/a, b.jpg\tdog\n", "list.csv"), write("2.jpg,cat\n", "val.csv")
    trained, validated = train_and_val(train, val)
    assert validated.classes == trained.classes == ("cat", "dog") and validated.labels.tolist() == [0]

    grow(tmp_path, ["folders/train/cat/1.jpg", "folders/train/dog/1.jpg", "folders/val/cat/1.jpg"])
    (tmp_path / "folders/val/dog").mkdir()
    folders = str(tmp_path / "folders")
    assert [len(files) for files in train_and_val(f"{folders}/")] == [2, 1]
    assert [len(files) for files in train_and_val(f"{folders}/train", f"{folders}/val")] == [2, 1]
    assert [len(files) for files in train_and_val(train, f"{folders}/val")] == [2, 1]
    assert [len(files) for files in train_and_val(f"{folders}/train", val)] == [2, 1]
    assert len(labeled_images(val, str(tmp_path / "cat"))) == 1

    with pytest.raises(UsageError, match=mentioning("--data list.csv --val-data")):
        train_and_val(train)
    with pytest.raises(UsageError, match=mentioning(f"--root /x {folders}/train {folders}/val")):
        train_and_val(folders, root="/x")
    with pytest.raises(UsageError, match=mentioning("val.csv 1 line 1 cow")):
        train_and_val(train, write("2.jpg,cow\n", "val.csv"))


def test_folders_that_are_not_what_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(grow(tmp_path, ["a/train/cat/1.jpg", "a/test/cat/1.jpg", "b/train/cat/1.jpg", "c/val/x/1.jpg"]))
    for data, values in (
        ("a", "a train/ val/ --data a/train --val-data a/test"),
        ("b/", "b/ train/ val/ --data b/train --val-data FOLDER"),
        ("none", f"none {tmp_path}"),
        (f"{tmp_path}/none", f"{tmp_path}/none"),
        ("c/val", "c/val train/ --val-data"),
    ):
        with pytest.raises(UsageError, match=mentioning(values)):
            train_and_val(data)
    grow(tmp_path, ["c/train/x/1.jpg"])
    with pytest.raises(UsageError, match=mentioning(f"c/train train/ --data {tmp_path}/c")):
        train_and_val("c/train")


def test_numbers_mean_others_in_folders_than_in_lists(tmp_path: Path) -> None:
    grow(tmp_path, [f"{i}/1.jpg" for i in range(11)])
    (tmp_path / "list.csv").write_text("\n".join(f"{i}/1.jpg,{i}" for i in range(11)))
    with pytest.raises(UsageError, match=mentioning("classes order folders numbers lists")):
        train_and_val(str(tmp_path / "list.csv"), str(tmp_path))
