"""Class folders: what ImageFolder finds in them, sorted alike, at scale and in stores; classes that differ."""

import os
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torchvision

from raydali.data.index.labeled import LabeledFiles, check_classes
from raydali.errors import UsageError
from tests.support.clocks import least_cpu_seconds
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.trees import NASTY, grow, read_by_dali, samples


def test_an_empty_class_stays(nasty: Path) -> None:
    shutil.rmtree(nasty / ".hidden")
    (nasty / "Aardvark" / "empty").mkdir(parents=True)
    ours = LabeledFiles.scan(str(nasty))
    theirs = torchvision.datasets.ImageFolder(str(nasty), allow_empty=True)
    assert (list(ours.classes), samples(ours)) == (theirs.classes, theirs.samples)


def test_fingerprint_is_of_the_data_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, files: list[str]) -> str:
        return LabeledFiles.scan(str(grow(tmp_path / name, files))).fingerprint

    base = fingerprint("base", ["a/1.jpg", "b/2.jpg"])
    assert fingerprint("moved", ["a/1.jpg", "b/2.jpg"]) == base
    others = [["a/1.jpg", "b/3.jpg"], ["a/1.jpg", "c/2.jpg"], ["a/1.jpg", "b/2.jpg", "c/x.txt"], ["a/1.jpg"]]
    assert len({base, *(fingerprint(str(n), files) for n, files in enumerate(others))}) == 5
    source = LabeledFiles.scan(str(tmp_path / "base"))
    numbers = (np.array([[first], [2]], np.float32) for first in (0.25, 0.75))
    assert len({replace(source, labels=labels).fingerprint for labels in numbers}) == 2


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("missing", "missing class folders"),
        ("file", "file is a file"),
        ("flat", "flat class folders"),
        ("none", "2 .jpg"),
        ("http://host/x", "http://host/x"),
        ("s3:///x", "s3:///x"),
        ("gs://a b/x", "gs://a b/x"),
    ],
)
def test_what_cannot_be_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, message: str) -> None:
    grow(tmp_path, ["file", "flat/1.jpg", "none/a/1.txt", "none/b/2.txt"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=mentioning(message)) as error:
        LabeledFiles.scan(root)
    assert "\n" not in str(error.value)


def test_check_classes(tmp_path: Path) -> None:
    train = LabeledFiles.scan(str(grow(tmp_path / "train", [f"{c}/1.jpg" for c in "abcdef"])))
    val = LabeledFiles.scan(str(grow(tmp_path / "val", [f"{c}/1.jpg" for c in "fg"])))
    check_classes(train, train.relocate("/elsewhere"))
    with pytest.raises(UsageError, match=mentioning("a b c 2 g 6")):
        check_classes(train, val)


def test_s3_bucket_as_root_with_an_empty_class(s3: PutObjects) -> None:
    s3("root", {"cat/1.jpg": b"1", "dog/": b"", "readme.jpg": b"not in a class"})
    index = LabeledFiles.scan("s3://root")
    assert (index.classes, samples(index)) == (("cat", "dog"), [("s3://root/cat/1.jpg", 0)])


def test_s3_errors(s3: PutObjects) -> None:
    s3("few", {"t/a/1.jpg": b"1", "odd/a/what?.jpg": b"1", "fine/a/what?.txt": b"", "fine/a/1.jpg": b"1"})
    for root, message in {
        "s3://no-such-bucket/t": "NO_SUCH_BUCKET",
        "s3://few/nowhere": "s3://few/nowhere cannot be listed",
        "s3://few/t/a/1.jpg": "Path does not exist 'few/t/a/1.jpg/'",
        "s3://few/t/a": "s3://few/t/a has no class folders",
        "s3://few/odd": "DALI cannot read 'few/odd/a/what?.jpg'",
    }.items():
        with pytest.raises(UsageError) as error:
            LabeledFiles.scan(root)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert len(LabeledFiles.scan("s3://few/fine")) == 1


def test_fingerprint_stays_what_it_was(tmp_path: Path) -> None:
    """Runs are resumed by it: another value would refuse all those of before."""
    index = LabeledFiles.scan(str(grow(tmp_path, ["a/1.jpg", "b/2.jpg"])))
    assert index.fingerprint == "5dbdfb5c59b3e3f86a1df1653e25c9c9"


def test_other_extensions(tmp_path: Path) -> None:
    root = str(grow(tmp_path, ["a/1.mp4", "a/1.jpg", "b/deep/2.MKV"]))
    index = LabeledFiles.scan(root, (".mp4", ".mkv"), "videos")
    assert samples(index) == [(f"{root}/a/1.mp4", 0), (f"{root}/b/deep/2.MKV", 1)]
    with pytest.raises(UsageError, match=mentioning("2 .avi")):
        LabeledFiles.scan(root, (".avi",), "videos")


def test_a_list_with_labels() -> None:
    index = LabeledFiles.from_list("/data", ["1.jpg", "/x/2.jpg"], labels=np.array([1, 0]), classes=("a", "b"))
    assert samples(index) == [("/data/1.jpg", 1), ("/x/2.jpg", 0)]
    fewer = LabeledFiles.from_list("/data", ["1.jpg"], labels=np.array([0]), classes=("a",))
    with pytest.raises(UsageError, match=mentioning("/data b /data/1.jpg 1")):
        check_classes(index, fewer)


def test_same_as_torchvision(nasty: Path) -> None:
    shutil.rmtree(nasty / ".hidden")  # a class in torchvision
    theirs = torchvision.datasets.ImageFolder(str(nasty))
    ours = LabeledFiles.scan(str(nasty))
    assert list(ours.classes) == theirs.classes
    assert samples(ours) == theirs.samples
    assert len(ours) == len(theirs.samples) > 25


def bare_walk(folder: str) -> int:
    files = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            files += bare_walk(entry.path) if entry.is_dir() else len(entry.name) > 0
    return files


@pytest.fixture(scope="module")
def many_files() -> Iterator[str]:
    order = np.random.default_rng(0).permutation(1000).tolist()
    with TemporaryDirectory(dir="/dev/shm") as root:
        for folder in range(50):
            Path(root, f"n{folder:08d}").mkdir()
            for file in order:
                os.mknod(f"{root}/n{folder:08d}/n{folder:08d}_{file * 37}.JPEG")
        yield root


def test_speed(many_files: str) -> None:
    index = LabeledFiles.scan(many_files)
    assert len(index) == bare_walk(many_files) == 50_000
    calls = (lambda: bare_walk(many_files), lambda: LabeledFiles.scan(many_files))
    bare, scan = (least_cpu_seconds(call, 6) for call in calls)
    assert scan <= 3 * bare


def test_memory(many_files: str) -> None:
    LabeledFiles.scan(many_files)
    tracemalloc.start()
    index = LabeledFiles.scan(many_files)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120 * len(index)  # 91 were measured


def test_paths_of_a_batch_cost_the_same_of_any_number_of_files(many_files: str, tmp_path: Path) -> None:
    def cpu_seconds(index: LabeledFiles) -> float:
        ids = np.random.default_rng(1).integers(0, len(index), 256)
        return least_cpu_seconds(lambda: index.encoded_paths(ids), 20)

    few = LabeledFiles.scan(str(grow(tmp_path, [f"n/n{i:08d}_{i:05d}.JPEG" for i in range(50)])))
    assert cpu_seconds(LabeledFiles.scan(many_files)) < 20 * cpu_seconds(few)


def test_s3_is_as_local(s3: PutObjects, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = LabeledFiles.scan(str(grow(tmp_path, NASTY)))
    markers = {"data/": b"", "data/cat/": b"", "data/cat/folder.jpg/": b"", "data-2/x/1.jpg": b"another prefix"}
    s3("nasty", {f"data/{file}": (tmp_path / file).read_bytes() for file in NASTY} | markers)
    caplog.clear()
    remote = LabeledFiles.scan("s3://nasty/data/")
    assert samples(remote) == samples(local.relocate("s3://nasty/data"))
    assert (remote.classes, remote.fingerprint) == (local.classes, local.fingerprint)
    (warned,) = [record.message for record in caplog.records if record.name.startswith("raydali")]
    assert mentions(warned, "s3://nasty/data 4 2 1")

    ids = np.random.default_rng(0).permutation(len(remote))
    assert read_by_dali(remote.encoded_paths(ids)) == [Path(local.path(id)).read_bytes() for id in ids.tolist()]


def test_gcs_is_as_local(gcs: dict[str, bytes], tmp_path: Path) -> None:
    local = LabeledFiles.scan(str(grow(tmp_path, NASTY)))
    gcs.update({f"data/{file}": b"" for file in [*NASTY, "", "cat/", "cat/folder.jpg/"]})
    remote = LabeledFiles.scan("gs://bucket/data")
    assert samples(remote) == samples(local.relocate("gs://bucket/data")) and remote.fingerprint == local.fingerprint
    for root in ("gs://bucket/nowhere", "gs://other/data"):
        with pytest.raises(UsageError, match=mentioning(f"{root} credentials")):
            LabeledFiles.scan(root)
