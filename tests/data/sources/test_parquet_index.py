"""Which rows of Parquet count as images and labels, files that are refused, the index and its cache."""

import logging
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from raydali.data.sources import parquet as sources_parquet
from raydali.data.sources.parquet import Parquet
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.parquets import write_parquet

pytestmark = pytest.mark.usefixtures("tar_cache")

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
