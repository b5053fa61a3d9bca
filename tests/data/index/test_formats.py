"""What names given as --data and --val-data stand for."""

from functools import partial
from pathlib import Path

import pytest

from raydali.data.index.formats import Kind, labeled_images, source_kind, train_and_val, unlabeled_files
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
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
        ("train-00000-of-00002.parquet", "parquet"),
        ("s3://bucket/data/{train,more}-*-of-*.parquet", "parquet"),
        ("gs://bucket/imagenet", "folder"),
        ("nowhere", "folder"),
    ],
)
def test_a_name_tells_the_kind(data: str, kind: Kind) -> None:
    assert source_kind(data) == kind


def test_what_exists_counts_more_than_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert source_kind(str(tmp_path / "file")) == "list"
    for name in ("a.csv", "b.tar", "train-of-3", "c.parquet"):
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
    monkeypatch.chdir(
        grow(
            tmp_path,
            [f"{data}/x/{i}.jpg" for i in range(2) for data in ("a/train", "a/test", "b/train", "c/val", "d/train")]
            + ["d/validation/x/1.jpg", "e/Train/x/1.jpg", "e/Test/x/1.jpg", "f/test/x/1.jpg", "f/valid/x/1.jpg"],
        )
    )
    (tmp_path / "empty").mkdir()
    for data, values in (
        ("a", "a train/ val/ --data a/train --val-data a/test --val-fraction 0.1"),
        ("a/train", f"a/train test/ --val-data {tmp_path}/a/test --val-fraction 0.1"),
        ("b/", "b/ train/ val/ --data b/train --val-data FOLDER --val-fraction 0.1"),
        ("d", "d train/ val/ --data d/train --val-data d/validation"),
        ("e", "e Train/ val/ --data e/Train --val-data e/Test"),
        ("f", "f train/ valid test"),
        ("none", f"none {tmp_path}"),
        (f"{tmp_path}/none", f"{tmp_path}/none"),
        ("empty", f"{tmp_path}/empty class"),
    ):
        with pytest.raises(UsageError, match=mentioning(values)):
            train_and_val(data)
    for data in ("b/train", "c/val"):
        assert [len(part) for part in train_and_val(data)] == [1, 1]
    assert [len(part) for part in train_and_val("a/train", val_fraction=0.1)] == [1, 1]
    assert [len(part) for part in train_and_val("a/train", "a/test")] == [2, 2]
    grow(tmp_path, ["c/train/x/1.jpg"])
    for data in ("c/train", "c/val/"):
        with pytest.raises(UsageError, match=mentioning(f"{data} train/ --data {tmp_path}/c")):
            train_and_val(data)
    with pytest.raises(UsageError, match=mentioning("--val-fraction 0.2 c train/ val/")):
        train_and_val("c", val_fraction=0.2)


def test_files_and_folders_of_one_class(tmp_path: Path) -> None:
    grow(tmp_path, ["pets/cat/1.jpg", "pets/dog/1.jpg", "pets.zip"])
    for data, values in (
        ("pets/cat/1.jpg", f"{tmp_path}/pets/cat/1.jpg image {tmp_path}/pets"),
        ("pets.zip", f"{tmp_path}/pets.zip archive"),
        ("pets/cat", f"{tmp_path}/pets/cat 1 images class {tmp_path}/pets"),
    ):
        with pytest.raises(UsageError, match=mentioning(values)):
            train_and_val(str(tmp_path / data))


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("w.pth", b"PK\3\4\0\0", "w.pth --weights"),
        ("W.SAFETENSORS", b"\x40\0\0\0\0\0\0\0{}", "W.SAFETENSORS --weights"),
        ("a.npy", b"\x93NUMPY\1\0v\0", "a.npy list UTF-8"),
        ("a.h5", b"\x89HDF\r\n\x1a\n\0", "a.h5 list UTF-8"),
        ("clip.mp4", b"\0\0\0 ftypisom", "clip.mp4 list UTF-8"),
        ("named-by-nothing", b"\x80\4\x95\0", "named-by-nothing list UTF-8"),
    ],
)
def test_a_file_that_is_not_text_is_no_list(tmp_path: Path, name: str, content: bytes, values: str) -> None:
    data = str(tmp_path / name)
    Path(data).write_bytes(content)
    for index in (
        train_and_val,
        labeled_images,
        source_kind,
        partial(unlabeled_files, root=None, extensions=(".jpg",)),
    ):
        with pytest.raises(UsageError, match=mentioning(values)):
            index(data)


def test_separators_of_lists_without_labels(tmp_path: Path) -> None:
    for text in ("1.jpg,2\n", "1.jpg\t0.5\n", "1.jpg;1.0\n", "path;label\n1.jpg;2\n", "1.jpg\n"):
        (tmp_path / "list.csv").write_text(text)
        assert unlabeled_files(str(tmp_path / "list.csv"), None, (".jpg",)).path(0) == f"{tmp_path}/1.jpg"
    (tmp_path / "list.csv").write_text("a;1.jpg\n")
    assert unlabeled_files(str(tmp_path / "list.csv"), None, (".jpg",)).path(0) == f"{tmp_path}/a;1.jpg"


def test_a_class_that_is_named_like_a_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, _ = train_and_val(str(grow(tmp_path, [f"{class_}/{i}.jpg" for class_ in ("cat", "test") for i in range(2)])))
    assert train.classes == ("cat", "test") and mentions(caplog.text, f"{tmp_path} 'test' class")


def test_numbers_mean_others_in_folders_than_in_lists(tmp_path: Path) -> None:
    grow(tmp_path, [f"{i}/1.jpg" for i in range(11)])
    (tmp_path / "list.csv").write_text("\n".join(f"{i}/1.jpg,{i}" for i in range(11)))
    with pytest.raises(UsageError, match=mentioning("classes order folders numbers lists")):
        train_and_val(str(tmp_path / "list.csv"), str(tmp_path))
