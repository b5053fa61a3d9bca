"""What a name given as --data stands for."""

from pathlib import Path

import pytest

from raydali.data.sources.formats import Kind, source_kind


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
