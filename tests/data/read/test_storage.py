"""Images in S3 and in Google's storage give the batches that the same files give on a local disk."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow.fs import FileSelector

from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.read import storage
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError
from raydali.run.folder import RunFolder
from tests.support.object_stores import FlakyS3, PutObjects
from tests.support.pictures import encoded, files, photograph
from tests.support.trees import bytes_of

TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (60 + i, 90 - i))) for i in range(20)}
    return files(tmp_path_factory.mktemp("local"), **made)


@pytest.fixture(params=["s3", "gs"])
def remote(request: pytest.FixtureRequest, local: LabeledFiles) -> LabeledFiles:
    """The same files in an object store."""
    objects = {f"data{path.removeprefix(local.root)}": Path(path).read_bytes() for path in map(local.path, range(20))}
    if request.param == "gs":
        request.getfixturevalue("gcs").update(objects)
        return LabeledFiles.scan("gs://bucket/data")
    put: PutObjects = request.getfixturevalue("s3")
    put("bucket", objects)
    return LabeledFiles.scan("s3://bucket/data")


def test_read_gives_the_files_bytes(local: LabeledFiles, remote: LabeledFiles) -> None:
    contents = [Path(local.path(id)).read_bytes() for id in range(20)]
    assert [local.read(id) for id in range(20)] == contents
    assert [remote.read(id) for id in range(20)] == contents
    copy = pickle.loads(pickle.dumps(remote))
    assert copy.read(7) == contents[7]
    ids = np.random.default_rng(0).permutation(20)
    for source in (local, remote):
        assert bytes_of(source.contents(ids)) == [contents[id] for id in ids]


def test_a_process_opens_a_store_once_and_for_itself(remote: LabeledFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = storage.file_system(remote.root)
    assert storage.file_system(remote.path(3)) is opened
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert storage.file_system(remote.root) is not opened


@pytest.mark.slow
def test_a_server_that_answers_after_seconds_is_awaited(flaky_s3: FlakyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS' own client asks again after 3 s, again and again."""
    RunFolder("s3://bucket/runs", "run").write_json("config.json", {})
    assert RunFolder("s3://bucket/runs", "run").filesystem is storage.file_system("s3://bucket")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", flaky_s3.url)
    flaky_s3.thinks, flaky_s3.calls = 3.5, 0
    found = storage.file_system("s3://bucket").get_file_info(FileSelector("bucket/runs", recursive=True))
    assert (len(found), flaky_s3.calls) == (2, 1)


@pytest.mark.parametrize("name", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_training_batches_are_the_local_ones(name: LoaderName, local: LabeledFiles, remote: LabeledFiles) -> None:
    stream = Stream(samples=20, epochs=3, batch_size=4, global_batch_size=8, seed=1)
    with make_loader(name, local, TRAIN, stream) as ours, make_loader(name, remote, TRAIN, stream) as theirs:
        batches = [*zip(ours, theirs, strict=True)]
    assert len(batches) == 14
    for one, other in batches:
        assert one.ids.tolist() == other.ids.tolist()
        assert torch.equal(one["images"], other["images"])
        assert torch.equal(one["labels"], other["labels"])


@pytest.mark.parametrize("name", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_validation_batches_are_the_local_ones(name: LoaderName, local: LabeledFiles, remote: LabeledFiles) -> None:
    order = OrderedPass(samples=20, batch_size=8)
    with make_loader(name, local, VALIDATION, order) as ours, make_loader(name, remote, VALIDATION, order) as theirs:
        for _ in range(2):
            batches = [*zip(ours, theirs, strict=True)]
            assert [len(batch.ids) for batch, _ in batches] == [8, 8, 4]
            assert all(torch.equal(one["images"], other["images"]) for one, other in batches)


@pytest.mark.parametrize("name", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_vanished_object_is_named(name: LoaderName, remote: LabeledFiles) -> None:
    gone = remote.relocate(f"{remote.root}/gone")
    with (
        make_loader(name, gone, VALIDATION, OrderedPass(samples=20, batch_size=8)) as loader,
        pytest.raises(DataError, match=r"bucket.*data/gone/0\d\d/\d+\.JPEG"),
    ):
        next(iter(loader))
