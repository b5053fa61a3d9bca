"""Validation samples: chosen by a hash of their paths, or warned of where they make metrics meaningless."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.file_list import FileList
from raydali.data.index.formats import train_and_val
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.index.validation_set import split, warn_of_overlap
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.tars import packed
from tests.support.trees import grow, nasty, samples

PICTURES = ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def sets(root: Path) -> Path:
    for name in ("train", "val"):
        grow(root / name, PICTURES)
        for path in (root / name).rglob("*.jpg"):
            path.write_bytes(path.read_bytes() * (1 + len(name)))
    return root


def test_sets_of_the_same_names_and_other_pictures_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = train_and_val(str(sets(tmp_path)))
    assert train.fingerprint == val.fingerprint
    warn_of_overlap(train, val)
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
    warn_of_overlap(*train_and_val(str(train), str(val)))
    assert mentions(said(caplog), "3 validation training samples")


def test_a_validation_set_inside_of_the_training_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    val = grow(sets(tmp_path) / "train" / "cat" / "held-out", PICTURES)
    train_and_val(str(tmp_path / "train"), str(val))
    assert mentions(said(caplog), f"{val} training")


def test_pairs_that_are_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grow(tmp_path, ["img/1.png", "gt/1.png"])
    pairs = ImagePairs.scan(str(tmp_path), "img", "gt")
    warn_of_overlap(pairs, pairs)
    assert mentions(said(caplog), "1 validation training samples")


__all__ = ["nasty"]
PETS = [f"{class_}/{i}.jpg" for class_ in ("cat", "dog", "\u00e9l\u00e9phant") for i in range(40)]


def names(part: LabeledSource) -> set[str]:
    return {*part.relative_paths()}


def named(part: LabeledSource) -> list[tuple[str, str]]:
    return [*zip(part.relative_paths(), (part.classes[label] for label in part.labels), strict=True)]


def test_the_same_files_at_any_root(tmp_path: Path) -> None:
    first, second = (LabeledFiles.scan(str(grow(tmp_path / name, PETS))) for name in ("a", "b"))
    (train, val), (_, other) = split(first, 0.1), split(second, 0.1)
    assert names(val) == names(other) and val.fingerprint == other.fingerprint
    assert names(train) | names(val) == {*PETS} and len(train) + len(val) == len(PETS)
    assert {*train.labels} == {*val.labels} == {0, 1, 2} and train.classes == val.classes == first.classes
    assert samples(first) == sorted(samples(train) + samples(val))


def test_which_files_they_are_never_changes() -> None:
    """A run is resumed with the same ones, with any later version."""
    files = LabeledFiles.from_list("/x", PETS, labels=np.repeat([0, 1, 2], 40), classes=("a", "b", "c"))
    elephants = {f"\u00e9l\u00e9phant/{i}.jpg" for i in (24, 33, 39)}
    assert names(split(files, 0.05)[1]) == {"cat/15.jpg", "cat/3.jpg", "dog/1.jpg"} | elephants


def test_more_files_do_not_move_others(tmp_path: Path) -> None:
    before = split(LabeledFiles.scan(str(grow(tmp_path, PETS))), 0.2)[1]
    after = split(LabeledFiles.scan(str(grow(tmp_path, [f"cat/more{i}.jpg" for i in range(40)]))), 0.2)[1]
    assert names(before) == {name for name in names(after) if "more" not in name}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.999, 1 - 2**-53])
def test_every_class_is_on_both_sides(fraction: float, tmp_path: Path) -> None:
    source = LabeledFiles.scan(str(grow(tmp_path, [f"{class_}/{i}.jpg" for class_ in "abc" for i in range(2)])))
    train, val = split(source, fraction)
    assert train.labels.tolist() == val.labels.tolist() == [0, 1, 2]


def test_the_share_is_about_the_fraction() -> None:
    many = [f"{i % 7}/{i}.jpg" for i in range(70_000)]
    files = LabeledFiles.from_list("/x", many, labels=np.arange(70_000) % 7, classes=tuple("abcdefg"))
    assert len(split(files, 0.1)[1]) == pytest.approx(7000, rel=0.05)


def test_a_class_of_one_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("'dog' --val-data")):
        train_and_val(str(grow(tmp_path, ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"])))


def test_lines_of_one_file_stay_together(tmp_path: Path) -> None:
    grow(tmp_path, PETS)
    (tmp_path / "list.csv").write_text("".join(f"{name},{name[:3]}\n" * 2 for name in PETS))
    train, val = split(FileList.from_file(str(tmp_path / "list.csv")), 0.3)
    assert not names(train) & names(val)
    (tmp_path / "list.csv").write_text("cat/1.jpg,cat\ncat/1.jpg,cat\n")
    with pytest.raises(UsageError, match=mentioning("'cat'")):
        split(FileList.from_file(str(tmp_path / "list.csv")), 0.3)


def test_folders_of_strange_names(nasty: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("'Zebra'")):
        train_and_val(str(nasty))
    for class_ in LabeledFiles.scan(str(nasty)).classes:
        grow(nasty, [f"{class_}/more{i}.jpg" for i in range(2)])
    train, val = train_and_val(str(nasty))
    assert sorted(named(train) + named(val)) == sorted(named(LabeledFiles.scan(str(nasty))))


def test_lists_and_shards_are_split_if_asked(tmp_path: Path) -> None:
    grow(tmp_path, PETS)
    (tmp_path / "all.csv").write_text("".join(f"{name},{name[:3]}\n" for name in PETS))
    shard = tmp_path / "shards" / "0.tar"
    shard.parent.mkdir()
    shard.write_bytes(packed({f"{name[:3]}/{name[4:]}": b"" for name in PETS}))
    for data in ("all.csv", "shards/0.tar", "shards"):
        with pytest.raises(UsageError, match=mentioning(f"{data} --val-data --val-fraction 0.1")):
            train_and_val(str(tmp_path / data))
        train, val = train_and_val(str(tmp_path / data), val_fraction=0.25)
        assert len(train) + len(val) == 120 and {*val.labels.tolist()} == {0, 1, 2}
    with pytest.raises(UsageError, match=mentioning("--val-fraction 0.1 --val-data")):
        train_and_val(str(tmp_path / "all.csv"), str(tmp_path / "all.csv"), val_fraction=0.1)


def test_folders_in_object_stores(s3: PutObjects, gcs: dict[str, bytes], tmp_path: Path) -> None:
    s3("split", {f"pets/{name}": b"" for name in PETS} | {f"x/{part}/cat/1.jpg": b"" for part in ("train", "val")})
    gcs |= {f"pets/{name}": b"" for name in PETS}
    local = train_and_val(str(grow(tmp_path, PETS)))[1]
    for data in ("s3://split/pets", "gs://bucket/pets/"):
        val = train_and_val(data)[1]
        assert names(val) == names(local)
    with pytest.raises(UsageError, match=mentioning("--data s3://split/x train/ val/")):
        train_and_val("s3://split/x/train")
    with pytest.raises(UsageError, match=mentioning("--val-fraction 0.5 s3://split/x")):
        train_and_val("s3://split/x", val_fraction=0.5)
    with pytest.raises(UsageError, match=mentioning("s3://split/none")):
        train_and_val("s3://split/none")
    with pytest.raises(UsageError, match=mentioning("s3://nobucket/pets endpoint")):
        train_and_val("s3://nobucket/pets")


@pytest.mark.slow
def test_a_million_paths_take_seconds() -> None:
    many = [f"n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(1_300_000)]
    files = LabeledFiles.from_list("/x", many, labels=np.arange(1_300_000) % 1000, classes=tuple(map(str, range(1000))))
    began = time.process_time()
    split(files, 0.1)
    seconds = time.process_time() - began
    assert seconds < 30  # 1.5 s when it was written
