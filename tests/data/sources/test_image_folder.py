"""The index of class folders: torchvision's to the letter, on disks and in object stores, fast and cheap to send."""

import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torchvision

from raydali.data.sources.labeled import LabeledFiles
from raydali.errors import UsageError
from tests.support.clocks import least_cpu_seconds
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.trees import NASTY, grow, read_by_dali, samples


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


@pytest.fixture
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
