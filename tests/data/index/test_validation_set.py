"""Validation samples: chosen by a hash of their paths, or warned of where they make metrics meaningless."""

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydali.data.index.file_list import FileList
from raydali.data.index.formats import train_and_val
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.index.validation_set import Split, split, warn_of_overlap
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
    (train, val), (_, other) = split(first, Split(0.1)), split(second, Split(0.1))
    assert names(val) == names(other) and val.fingerprint == other.fingerprint
    assert names(train) | names(val) == {*PETS} and len(train) + len(val) == len(PETS)
    assert {*train.labels} == {*val.labels} == {0, 1, 2} and train.classes == val.classes == first.classes
    assert samples(first) == sorted(samples(train) + samples(val))


def test_which_files_they_are_never_changes() -> None:
    """A run is resumed with the same ones, with any later version."""
    files = LabeledFiles.from_list("/x", PETS, labels=np.repeat([0, 1, 2], 40), classes=("a", "b", "c"))
    elephants = {f"\u00e9l\u00e9phant/{i}.jpg" for i in (24, 33, 39)}
    assert names(split(files, Split(0.05))[1]) == {"cat/15.jpg", "cat/3.jpg", "dog/1.jpg"} | elephants


def test_more_files_do_not_move_others(tmp_path: Path) -> None:
    before = split(LabeledFiles.scan(str(grow(tmp_path, PETS))), Split(0.2))[1]
    after = split(LabeledFiles.scan(str(grow(tmp_path, [f"cat/more{i}.jpg" for i in range(40)]))), Split(0.2))[1]
    assert names(before) == {name for name in names(after) if "more" not in name}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.999, 1 - 2**-53])
def test_every_class_is_on_both_sides(fraction: float, tmp_path: Path) -> None:
    source = LabeledFiles.scan(str(grow(tmp_path, [f"{class_}/{i}.jpg" for class_ in "abc" for i in range(2)])))
    train, val = split(source, Split(fraction))
    assert train.labels.tolist() == val.labels.tolist() == [0, 1, 2]


def test_the_share_is_about_the_fraction() -> None:
    many = [f"{i % 7}/{i}.jpg" for i in range(70_000)]
    files = LabeledFiles.from_list("/x", many, labels=np.arange(70_000) % 7, classes=tuple("abcdefg"))
    assert len(split(files, Split(0.1))[1]) == pytest.approx(7000, rel=0.05)


def test_a_class_of_one_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("'dog' --val-data")):
        train_and_val(str(grow(tmp_path, ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"])))


def test_lines_of_one_file_stay_together(tmp_path: Path) -> None:
    grow(tmp_path, PETS)
    (tmp_path / "list.csv").write_text("".join(f"{name},{name[:3]}\n" * 2 for name in PETS))
    train, val = split(FileList.from_file(str(tmp_path / "list.csv")), Split(0.3))
    assert not names(train) & names(val)
    (tmp_path / "list.csv").write_text("cat/1.jpg,cat\ncat/1.jpg,cat\n")
    with pytest.raises(UsageError, match=mentioning("'cat'")):
        split(FileList.from_file(str(tmp_path / "list.csv")), Split(0.3))


PATIENTS = [f"{'cat' if i % 3 else 'dog'}/patient{i % 11}_{i}.jpg" for i in range(88)]


def listed(paths: list[str]) -> LabeledFiles:
    classes = tuple(sorted({path.partition("/")[0] for path in paths}))
    labels = np.array([classes.index(path.partition("/")[0]) for path in paths])
    return LabeledFiles.from_list("/x", paths, labels=labels, classes=classes)


@pytest.mark.parametrize("folds", [2, 3, 5, 8])
def test_folds_are_equal_parts_of_each_class_and_each_sample_validates_once(folds: int) -> None:
    parts = [split(listed(PETS), Split(fold=f"{number}/{folds}")) for number in range(1, folds + 1)]
    assert sorted(name for _, val in parts for name in names(val)) == sorted(PETS)
    for train, val in parts:
        assert names(train) == {*PETS} - names(val)
        assert all(abs(count - 40 / folds) < 1 for count in np.bincount(val.labels)) and abs(len(val) - 120 / folds) < 1


def test_which_fold_a_sample_is_in_never_changes() -> None:
    assert names(split(listed(PETS[:12] + PETS[40:52]), Split(fold="2/5"))[1]) == {
        "cat/5.jpg",
        "cat/10.jpg",
        "cat/2.jpg",
        "dog/7.jpg",
        "dog/4.jpg",
    }


@pytest.mark.parametrize("asked", [Split(0.3), *(Split(fold=f"{number}/5") for number in range(1, 6))])
@pytest.mark.parametrize("group", [r"(patient\d+)_", r"/(p)atient(\d+)_", r"(patient[1-9]\d*)_"])
def test_samples_of_a_group_never_part(asked: Split, group: str, caplog: pytest.LogCaptureFixture) -> None:
    train, val = split(listed(PATIENTS), replace(asked, group=group))
    sides = [{re.sub(r".*/(patient\d+)_.*", r"\1", name) for name in names(part)} for part in (train, val)]
    assert sides[0] & sides[1] <= ({"patient0"} if "[" in group else set())
    assert len(sides[0] | sides[1]) == 11 and min(map(len, sides)) >= 2 and {*train.labels} == {0, 1}
    assert mentions(said(caplog), "8 88 'cat/patient0_11.jpg'") == ("[" in group)


def test_groups_at_other_places_are_the_same() -> None:
    moved = [f"{path.partition('/')[0]}/2024/{path.partition('/')[2]}" for path in PATIENTS]
    parts = [split(listed(paths), Split(fold="1/3", group=r"(patient\d+)_"))[1] for paths in (PATIENTS, moved)]
    assert names(parts[0]) == {name.replace("2024/", "") for name in names(parts[1])}


def test_a_group_that_is_the_path_changes_nothing() -> None:
    assert names(split(listed(PETS), Split(0.2, group="(.*)"))[1]) == names(split(listed(PETS), Split(0.2))[1])


def test_groups_of_a_column(tmp_path: Path) -> None:
    grow(tmp_path, PETS)
    lines = [f"{name},{name[:3]},p{int(name[4:-4]) % 7 if name[3] == '/' else 7}\n" for name in PETS]
    (tmp_path / "all.csv").write_text("path,species,patient\n" + "".join(lines))
    options: dict[str, str] = {"label_column": "species", "val_group": "column:patient"}
    for chosen in ({"fold": "2/3"}, {"val_fraction": 0.2}):
        train, val = train_and_val(str(tmp_path / "all.csv"), **options, **chosen)  # type: ignore[arg-type]
        patients = [
            {line.split(",")[2] for line in lines if line.split(",")[0] in names(part)} for part in (train, val)
        ]
        assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 8 and len(train) + len(val) == 120
    with pytest.raises(UsageError, match=mentioning("all.csv 'place' 'patient' --val-group")):
        train_and_val(str(tmp_path / "all.csv"), label_column="species", val_group="column:place")
    with pytest.raises(UsageError, match=mentioning(f"column:place lists {tmp_path}")):
        train_and_val(str(tmp_path), val_group="column:place")


def test_a_class_whose_samples_all_stay_together(caplog: pytest.LogCaptureFixture) -> None:
    files = listed([*PATIENTS, "horse/patient99_1.jpg", "horse/patient99_2.jpg"])
    train, val = split(files, Split(0.3, group=r"(patient\d+)_"))
    assert {*train.labels} == {0, 1, 2} and {*val.labels} == {0, 1}
    assert mentions(said(caplog), "no sample 'horse'")
    with pytest.raises(UsageError, match=mentioning("--val-group no group smaller")):
        split(listed(PETS), Split(group="(.*)/"))


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "1/0", "2", "a/5", "1/5/5", "-1/5", "1.5/5", ""])
def test_folds_that_are_none(fold: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--fold K/N {fold}")):
        Split(fold=fold)


@pytest.mark.parametrize(
    ("asked", "values"),
    [
        ({"group": "(patient"}, "--val-group (patient unterminated"),
        ({"group": r"patient\d+"}, "--val-group no group parentheses"),
        ({"group": "(nurse)"}, "--val-group (nurse) 'cat/patient1_1.jpg'"),
        ({"group": "(patient)"}, "1 group --val-group (patient) needs 2"),
        ({"group": r"(patient\d+)_", "fold": "3/12"}, "11 groups --fold 3/12 needs 12"),
        ({"fold": "3/89"}, "88 paths --fold 3/89 needs 89"),
        ({"fold": "3/4", "fraction": 0.2}, "--fold 3/4 --val-fraction 0.2"),
    ],
)
def test_splits_that_cannot_be_made(asked: dict[str, Any], values: str) -> None:
    with pytest.raises(UsageError, match=mentioning(values)):
        split(listed(PATIENTS[1:] + PATIENTS[:1]), Split(**asked))


def test_a_fold_of_data_that_are_split_already(tmp_path: Path) -> None:
    grow(tmp_path, [f"{part}/{name}" for part in ("train", "val") for name in PETS])
    with pytest.raises(UsageError, match=mentioning(f"--fold 1/3 {tmp_path} train/ val/ {tmp_path}/train")):
        train_and_val(str(tmp_path), fold="1/3")
    with pytest.raises(UsageError, match=mentioning("--fold 1/3 --val-data")):
        train_and_val(f"{tmp_path}/train", f"{tmp_path}/val", fold="1/3")
    assert len(train_and_val(f"{tmp_path}/train", fold="1/3")[1]) == 40


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


@pytest.mark.slow
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
    split(files, Split(0.1))
    seconds = time.process_time() - began
    assert seconds < 30  # 1.5 s when it was written
