"""Parquet files by name, a damaged row group, what rows count as images and labels, the index and its cache."""

import logging
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from raydali.data.broken.quarantine import Quarantine
from raydali.data.index import parquet as sources_parquet
from raydali.data.index.formats import labeled_images, train_and_val
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.parquet import Parquet
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from raydali.errors import UsageError
from tests.support.broken import folder
from tests.support.messages import mentioning, mentions
from tests.support.parquets import packed_in_parquet, write_parquet

SAMPLES = 30
TRAIN = TrainImages(image_size=32, seed=3)
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=2, global_batch_size=6, seed=1)

pytestmark = pytest.mark.usefixtures("tar_cache")


@pytest.fixture
def folders(tmp_path: Path) -> LabeledFiles:
    """30 photographs of 3 classes."""
    return folder(tmp_path / "folders", SAMPLES, {})


# ----------------------------------------------------------------------------------------------------------------------
# Naming files


def test_training_and_validation(tmp_path: Path, folders: LabeledFiles) -> None:
    data = packed_in_parquet(tmp_path, folders)
    val_data = packed_in_parquet(tmp_path, folders.drop(range(20)), 1, "validation")
    train, val = train_and_val(data, val_data)
    assert isinstance(train, Parquet) and isinstance(val, Parquet)
    assert len(train) == SAMPLES and train.classes == val.classes == folders.classes
    assert train.labels.tolist() == folders.labels.tolist() and val.labels.tolist() == folders.labels[20:].tolist()
    with pytest.raises(UsageError, match=mentioning(f"--data {data} --val-data --val-fraction 0.1")):
        train_and_val(data)
    with pytest.raises(UsageError, match=mentioning("--root /x")):
        train_and_val(data, val_data, "/x")
    with pytest.raises(UsageError, match=mentioning(f"--multi-label {data}")):
        train_and_val(data, val_data, multi_label=True)
    with pytest.raises(UsageError, match=mentioning(f"--image-column x {folders.root}")):
        train_and_val(folders.root, image_column="x")
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", [b""], [0], names=["cow"])
    with pytest.raises(UsageError, match=mentioning("labels training 'cow'")):
        train_and_val(data, val_data)


def test_a_share_that_validates(tmp_path: Path, folders: LabeledFiles) -> None:
    train, val = train_and_val(packed_in_parquet(tmp_path, folders), val_fraction=0.2)
    assert {*train.relative_paths()} | {*val.relative_paths()} == {
        f"train-{id // 10:05}-of-00003.parquet#{id % 10}" for id in range(SAMPLES)
    }
    assert len(train) + len(val) == SAMPLES and {*val.labels.tolist()} == {0, 1, 2}
    for part in (train, val):
        numbers = [int(path[6:11]) * 10 + int(path.rpartition("#")[2]) for path in part.relative_paths()]
        assert [part.read(id) for id in range(len(part))] == [folders.read(number) for number in numbers]


def test_a_cloned_data_set(tmp_path: Path, folders: LabeledFiles) -> None:
    clone = tmp_path / "clone"
    data, val_data = (
        packed_in_parquet(clone / "data", part, 2, split)
        for part, split in ((folders, "train"), (folders.drop(range(20)), "validation"))
    )
    packed_in_parquet(clone / "data", folders.drop(range(25)), 1, "test")
    (clone / "README.md").touch()
    for folder_ in (clone, clone / "data"):
        train, val = train_and_val(str(folder_))
        assert [each.fingerprint for each in (train, val)] == [
            Parquet.scan(each).fingerprint for each in (data, val_data)
        ]
        with pytest.raises(UsageError, match=mentioning(f"{folder_} train '{clone}/data/")):
            labeled_images(str(folder_))
        with pytest.raises(UsageError, match=mentioning(f"--data {folder_} --data '{data}' --val-fraction 0.3")):
            train_and_val(str(folder_), val_fraction=0.3)
    assert len(train_and_val(str(clone), image_column="image", label_column="label")[0]) == SAMPLES


def test_folders_of_files(tmp_path: Path, folders: LabeledFiles) -> None:
    for split in ("train", "val"):
        packed_in_parquet(tmp_path / "sets" / split, folders, 2, "0")
    train, _ = train_and_val(str(tmp_path / "sets"))
    assert isinstance(train, Parquet) and train.shards == ("0-00000-of-00002.parquet", "0-00001-of-00002.parquet")
    only = packed_in_parquet(tmp_path / "one", folders, 1)
    with pytest.raises(UsageError, match=mentioning(f"--data {tmp_path}/one '{only}' --val-data --val-fraction 0.1")):
        train_and_val(str(tmp_path / "one"))
    assert [len(part) > 0 for part in train_and_val(str(tmp_path / "one"), val_fraction=0.5)] == [True, True]
    assert len(labeled_images(f"{tmp_path}/one/")) == SAMPLES


def test_a_damaged_row_group_is_broken_samples(tmp_path: Path, folders: LabeledFiles) -> None:
    from pyarrow.parquet import read_metadata

    images = Parquet.scan(packed_in_parquet(tmp_path, folders))
    file = tmp_path / images.shards[1]
    content, column = bytearray(file.read_bytes()), read_metadata(file).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + 40] = b"\xff" * 40
    file.write_bytes(content)
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader("dali", images, TRAIN, STREAM, quarantine=lambda _: quarantine) as loader:
        assert sum(len(batch.ids) for batch in loader) == 2 * SAMPLES
    assert quarantine.known.keys() == {15, 16, 17, 18, 19}
    assert mentions(str(quarantine.known[15]), f"{file}#5 row group 1 damaged")


# ----------------------------------------------------------------------------------------------------------------------
# The index


IMAGES = [b"%d" % i * 50 for i in range(6)]


def found(images: Parquet) -> list[tuple[bytes, str]]:
    return [(images.read(id), images.classes[label]) for id, label in enumerate(images.labels.tolist())]


def test_names_of_hugging_face_in_their_order(tmp_path: Path) -> None:
    names = ["zebra", "ant", "cow", "unseen"]
    write_parquet(tmp_path / "0.parquet", IMAGES, [2, 0, 1, 1, 0, 2], names=names, rows=4)
    images = Parquet.scan(f"{tmp_path}/*.parquet")
    assert images.classes == tuple(names) and images.labels.tolist() == [2, 0, 1, 1, 0, 2]
    assert found(images) == [*zip(IMAGES, ["cow", "zebra", "ant", "ant", "zebra", "cow"], strict=True)]
    assert images.path(4) == f"{tmp_path}/0.parquet#4"
    assert Parquet.scan(f"{tmp_path}/*.parquet", names[::-1]).labels.tolist() == [1, 3, 2, 2, 3, 1]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("compression", ["snappy", "none", "zstd"])
def test_texts_and_numbers_in_other_columns(tmp_path: Path, plain: bool, compression: str) -> None:
    options: dict[str, Any] = {"columns": ("img", "kind"), "plain": plain, "compression": compression, "rows": 5}
    path = write_parquet(tmp_path / "a.PARQUET", IMAGES, ["b", "b", "a", "a", "c", "c"], **options)
    named = Parquet.scan(str(path), image_column="img", label_column="kind")
    assert found(named) == [*zip(IMAGES, "bbaacc", strict=True)]
    path = write_parquet(tmp_path / "b.parquet", IMAGES, [0, 10, 2, 2, 10, 0], **options)
    numbered = Parquet.scan(str(path), image_column="img", label_column="kind")
    assert numbered.classes == ("0", "2", "10") and numbered.labels.tolist() == [0, 2, 1, 1, 2, 0]


def test_dictionaries_and_large_types(tmp_path: Path) -> None:
    columns = {
        "image": pyarrow.array(IMAGES, pyarrow.large_binary()),
        "label": pyarrow.array([*"abcabc"]).dictionary_encode(),
        "other": pyarrow.array([[1]] * 6),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert found(Parquet.scan(f"{tmp_path}/a.parquet")) == [*zip(IMAGES, "abcabc", strict=True)]


def test_numbers_with_holes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Parquet.scan(str(write_parquet(tmp_path / "a.parquet", IMAGES, [1, 2, 4] * 2)))
    assert mentions(caplog.text, "a.parquet 3 classes '1' '2' '4'")


@pytest.mark.parametrize(
    ("columns", "labels", "options", "values"),
    [
        (("img", "label"), [0] * 6, {}, "no column 'image' 'img' 'label' --image-column"),
        (("image", "fine"), [0] * 6, {}, "no column 'label' 'image' 'fine' --label-column"),
        (("label", "image"), [0] * 6, {}, "column 'image' int64 bytes --image-column"),
        (("image", "label"), [0.5] * 6, {}, "column 'label' double --label-column"),
        (("image", "label"), [[0]] * 6, {}, "column 'label' list int64"),
        (("image", "label"), [0, 1, -1, -1, 0, 0], {"names": ["a", "b"]}, "2 rows 2 classes row 2 -1"),
        (("image", "label"), [0, 1, 2, 0, 0, 0], {"names": ["a", "b"]}, "1 row row 2 with 2"),
        (("image", "label"), [0, None, 2, 0, 0, 0], {}, "1 row without label row 1"),
    ],
)
def test_wrong_columns(
    tmp_path: Path, columns: tuple[str, str], labels: list[Any], options: dict[str, Any], values: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", IMAGES, labels, columns=columns, **options)
    with pytest.raises(UsageError, match=mentioning(f"{path} {values}")):
        Parquet.scan(str(path))


def test_files_without_images(tmp_path: Path) -> None:
    some = Parquet.scan(str(write_parquet(tmp_path / "some.parquet", [b"one", None], [0, 1])))
    assert [some.read(id) for id in range(2)] == [b"one", b""]
    path = write_parquet(tmp_path / "paths.parquet", [None] * 6, [0] * 6)
    with pytest.raises(UsageError, match=mentioning("paths.parquet 'image' no bytes 6 rows")):
        Parquet.scan(str(path))
    path = write_parquet(tmp_path / "none.parquet", [], pyarrow.array([], pyarrow.int64()).to_pylist(), names=["a"])
    with pytest.raises(UsageError, match=mentioning("none.parquet")):
        Parquet.scan(str(path))
    with pytest.raises(UsageError, match=mentioning(f"1 {tmp_path} nowhere.parquet")):
        Parquet.scan(f"{tmp_path}/nowhere.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"<html></html>" * 9, None])
def test_broken_files(tmp_path: Path, content: bytes | None) -> None:
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet", IMAGES, [0, 1] * 3)
    whole = (tmp_path / "a.parquet").read_bytes()
    for name in "ba":
        (tmp_path / f"{name}.parquet").write_bytes(whole[:-50] if content is None else content)
        with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/{name}.parquet Parquet")):
            Parquet.scan(f"{tmp_path}/*.parquet")


def test_files_that_differ(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", IMAGES, [0, 1] * 3, names=["cat", "dog"])
    write_parquet(tmp_path / "b.parquet", IMAGES, [0, 1] * 3, names=["dog", "cat"])
    with pytest.raises(UsageError, match=mentioning("b.parquet names dog, cat")):
        Parquet.scan(f"{tmp_path}/*.parquet")
    write_parquet(tmp_path / "b.parquet", IMAGES, [0, 1] * 3, columns=("image", "x"))
    with pytest.raises(UsageError, match=mentioning("b.parquet 'label' 'x'")):
        Parquet.scan(f"{tmp_path}/*.parquet")


def test_row_groups_that_arrow_cannot_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", IMAGES, [0, 1] * 3, rows=3)
    monkeypatch.setitem(vars(sources_parquet), "_LONGEST", 100)
    with pytest.raises(UsageError, match=mentioning("a.parquet row group 0 2 GB")):
        Parquet.scan(str(path))


def test_the_index_is_cached_by_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"image": IMAGES, "other": IMAGES[::-1], "a": [0, 1] * 3, "b": [1, 0] * 3}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")

    def scan(image: str, label: str) -> Parquet:
        return Parquet.scan(f"{tmp_path}/a.parquet", image_column=image, label_column=label)

    one, other = scan("image", "a"), scan("other", "b")
    assert one.labels.tolist() == [0, 1] * 3 and other.labels.tolist() == [1, 0] * 3
    assert [other.read(id) for id in range(6)] == IMAGES[::-1]
    assert len({one.fingerprint, other.fingerprint, scan("other", "a").fingerprint}) == 3

    def refuse(*_: object) -> None:
        raise AssertionError("the file is indexed again")

    monkeypatch.setitem(vars(sources_parquet), "_part", refuse)
    assert scan("image", "a").fingerprint == one.fingerprint
