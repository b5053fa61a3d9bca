"""Files whose contents change under their names: noticed for each kind of data, and copies are the same data."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index import masked_images
from raydali.data.index.coco import Coco
from raydali.data.index.file_list import FileList
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.parquet import Parquet
from raydali.data.index.source import Source
from raydali.data.index.tar import TarShards
from raydali.data.index.tfrecord import TFRecords
from raydali.data.read import storage
from raydali.data.video.clips import VideoClips
from raydali.errors import UsageError
from raydali.run.data_contents import DATA_CONTENTS, FILES, check_contents, compared_contents, sample, write_contents
from raydali.run.folder import RunFolder
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.parquets import write_parquet
from tests.support.ranks import folder_of
from tests.support.tars import packed
from tests.support.tfrecords import tfrecords
from tests.support.videos import moving, write_video

A, B = bytes(9000) + b"a", bytes(12000) + b"b"
NAMES = ["cat/1.jpg", "dog/1.jpg"]


@pytest.fixture(autouse=True)
def cache_of_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))


def write(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def folder(root: Path, one: bytes, other: bytes) -> Source:
    write(root, dict(zip(NAMES, (one, other), strict=True)))
    return LabeledFiles.scan(str(root))


def file_list(root: Path, one: bytes, other: bytes) -> Source:
    folder(root, one, other)
    (root / "list.csv").write_text("cat/1.jpg,cat\ndog/1.jpg,dog\n")
    return FileList.from_file(str(root / "list.csv"))


def pairs(root: Path, one: bytes, other: bytes) -> Source:
    write(root, {"img/1.png": A, "img/2.png": A, "gt/1.png": one, "gt/2.png": other})
    return ImagePairs.scan(str(root))


def masks(root: Path, one: bytes, other: bytes) -> Source:
    for split in ("train", "val"):
        write(root / split, {"images/1.jpg": A, "images/2.jpg": A, "masks/1.png": one, "masks/2.png": other})
    return masked_images.train_and_val(str(root), classes="2")[0]


def coco(root: Path, one: bytes, other: bytes) -> Source:
    write(root, {"1.jpg": one, "2.jpg": other})
    images = [{"id": id, "file_name": f"{id}.jpg", "height": 9, "width": 9} for id in (1, 2)]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}]
    categories = [{"id": 1, "name": "cat"}]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (root / "instances.json").write_text(json.dumps(content))
    return Coco.from_file(str(root / "instances.json"), str(root))


def tar(root: Path, one: bytes, other: bytes) -> Source:
    write(root, {"1.tar": packed(dict(zip(NAMES, (one, other), strict=True)))})
    return TarShards.scan(f"{root}/*.tar")


def tfrecord(root: Path, one: bytes, other: bytes) -> Source:
    write(root, {"t-00000-of-00001": tfrecords([(one, 1), (other, 2)])})
    return TFRecords.scan(f"{root}/t-*-of-00001")


def parquet(root: Path, one: bytes, other: bytes) -> Source:
    write_parquet(root / "1.parquet", [one, other], [0, 1], rows=1, compression="none")
    return Parquet.scan(f"{root}/*.parquet")


def video(root: Path, one: bytes, other: bytes) -> Source:
    for name, content in zip(("cat", "dog"), (one, other), strict=True):
        write_video(root / name / "1.mp4", moving(8, start=len(content)), "h264")
    return VideoClips.scan(str(root), sequence_length=4)


@pytest.mark.parametrize(
    ("make", "files", "changed"),
    [
        (folder, 2, "cat/1.jpg dog/1.jpg"),
        (file_list, 2, "cat/1.jpg dog/1.jpg"),
        (pairs, 4, "gt/1.png gt/2.png"),
        (masks, 4, "masks/1.png masks/2.png"),
        (coco, 2, "1.jpg 2.jpg"),
        (tar, 2, "1.tar:cat/1.jpg 1.tar:dog/1.jpg"),
        (tfrecord, 2, "#0 #1"),
        (parquet, 2, "#0 #1"),
        (video, 2, "cat/1.mp4 dog/1.mp4"),
    ],
)
def test_exchanged_contents_are_named(
    tmp_path: Path, make: Callable[[Path, bytes, bytes], Source], files: int, changed: str
) -> None:
    run = folder_of(tmp_path)
    before = make(tmp_path / "data", A, B)
    contents = check_contents(run, before, before)
    assert contents and not run.exists(DATA_CONTENTS)
    write_contents(run, contents)
    assert compared_contents(run, [before]) == ("", {})

    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for file in (tmp_path / "copy").rglob("*"):
        os.utime(file, (1, 1))
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "copy").rename(tmp_path / "data")
    assert compared_contents(run, [before]) == ("", {})

    after = make(tmp_path / "data", B, A)
    assert after.fingerprint == before.fingerprint
    words, _ = compared_contents(run, [after])
    assert mentions(words, f"2 {files} files {changed}")
    with pytest.raises(UsageError, match=mentioning(f"{run} 4 {2 * files} {changed} --name {DATA_CONTENTS}")):
        check_contents(run, after, after)


def test_other_samples_are_kept_beside_those_of_the_run(tmp_path: Path) -> None:
    """An evaluation compares only samples with names and labels of the run, and a run of before has nothing."""
    run = folder_of(tmp_path)
    one, other = folder(tmp_path / "one", A, B), coco(tmp_path / "other", B, A)
    write_contents(run, check_contents(run, one, one))
    words, contents = compared_contents(run, [one, other])
    assert not words and len(contents) == 2
    write_contents(run, contents)
    assert compared_contents(run, [one, other]) == ("", {})


def test_a_sample_has_one_of_each_part() -> None:
    ids = sample(FILES, np.arange(1_281_167))
    edges = np.linspace(0, 1_281_167, FILES + 1).astype(int)
    assert (edges[:-1] <= ids).all() and (ids < edges[1:]).all() and len({*np.diff(ids).tolist()}) > FILES // 2
    assert sample(FILES, np.arange(7)).tolist() == [*range(7)]


@pytest.fixture
def bucket(s3: PutObjects) -> Callable[[dict[str, bytes]], LabeledFiles]:
    def scanned(objects: dict[str, bytes]) -> LabeledFiles:
        s3("contents", {f"data/{name}": content for name, content in objects.items()})
        return LabeledFiles.scan("s3://contents/data")

    return scanned


OBJECTS = {f"{'cat' if i % 2 else 'dog'}/{i:04}.jpg": bytes(20_000) + b"%d" % i for i in range(80)}


def kept(run: RunFolder, source: Source) -> None:
    write_contents(run, compared_contents(run, [source])[1])


def test_an_object_of_the_same_size_is_named_by_its_etag(
    tmp_path: Path, bucket: Callable[[dict[str, bytes]], LabeledFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, objects = folder_of(tmp_path), OBJECTS
    before = bucket(objects)
    assert before.versions is not None and (before.versions > 0).all()
    assert before.drop([0, 3]).versions[1:3].tolist() == before.versions[[2, 4]].tolist()  # type: ignore[index]
    kept(run, before)
    middle = bytearray(objects["cat/0001.jpg"])
    middle[10_000] = 1
    after = bucket({"cat/0001.jpg": bytes(middle)})
    words, _ = compared_contents(run, [after])
    assert mentions(words, "1 80 files s3://contents/data/cat/0001.jpg")

    def no_list(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(storage, "listed_by_obstore", no_list)  # as pyarrow lists them, which has no ETags
    by_arrow = LabeledFiles.scan("s3://contents/data")
    assert by_arrow.versions is not None and (by_arrow.versions[:, 1] < 0).all()
    assert compared_contents(run, [by_arrow]) == ("", {})


@pytest.mark.slow
def test_a_copy_in_another_store_is_the_same_data(
    tmp_path: Path, bucket: Callable[[dict[str, bytes]], LabeledFiles]
) -> None:
    run, local = folder_of(tmp_path), tmp_path / "local"
    write(local, OBJECTS)
    kept(run, LabeledFiles.scan(str(local)))
    objects = bucket(OBJECTS)
    assert compared_contents(run, [objects]) == ("", {})
    other = folder_of(tmp_path, "other")
    kept(other, objects)
    assert compared_contents(other, [LabeledFiles.scan(str(local))]) == ("", {})
    write(local, {"cat/0001.jpg": b"shorter"})
    for compared in (run, other):
        words, _ = compared_contents(compared, [LabeledFiles.scan(str(local))])
        assert mentions(words, f"1 80 files {local}/cat/0001.jpg")


@pytest.mark.slow
def test_a_list_of_keys_learns_their_etags_at_the_start(
    tmp_path: Path, bucket: Callable[[dict[str, bytes]], LabeledFiles]
) -> None:
    bucket(OBJECTS)
    run, lines = folder_of(tmp_path), [f"s3://contents/data/{name},{name[:3]}\n" for name in OBJECTS]
    (tmp_path / "list.csv").write_text("".join(lines))
    source = FileList.from_file(str(tmp_path / "list.csv"))
    assert source.versions is None
    kept(run, source)
    middle = bytearray(OBJECTS["cat/0001.jpg"])
    middle[10_000] = 1
    bucket({"cat/0001.jpg": bytes(middle)})
    assert mentions(compared_contents(run, [source])[0], "1 80 files s3://contents/data/cat/0001.jpg")


def test_a_key_that_is_not_there_is_unknown(tmp_path: Path, bucket: Callable[[dict[str, bytes]], LabeledFiles]) -> None:
    bucket(OBJECTS)
    (tmp_path / "list.csv").write_text("s3://contents/data/cat/0001.jpg,cat\ns3://contents/data/dog/9.jpg,dog\n")
    run, source = folder_of(tmp_path), FileList.from_file(str(tmp_path / "list.csv"))
    kept(run, source)
    bucket({"cat/0001.jpg": b"other", "dog/9.jpg": b"new"})
    assert mentions(compared_contents(run, [source])[0], "1 2 files s3://contents/data/cat/0001.jpg")
