"""TFRecord files by name, read at random, and in the stream: as class folders of the same images are."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.imagenet import Data, train
from raydali.commands.prepare import Prepare
from raydali.commands.prepare import main as prepare
from raydali.commands.preview import Preview
from raydali.commands.preview import main as preview
from raydali.commands.verify import Verify
from raydali.commands.verify import main as verify
from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.loading.quarantine import Quarantine, substitute
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.formats import labeled_images, train_and_val
from raydali.data.sources.labeled import LabeledFiles, LabeledSource
from raydali.data.sources.tfrecord import TFRecords, names_tfrecords
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, folder
from tests.support.digits import SHORT, digits_data
from tests.support.job_ranks import train_rank
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.ranks import folder_of, run_ranks
from tests.support.tfrecords import tfrecords
from tests.support.traces import assert_whole

SAMPLES = 30
TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=2, global_batch_size=6, seed=1)

pytestmark = pytest.mark.usefixtures("tar_cache")


def pack(root: Path, source: LabeledSource, files: int = 3, split: str = "train", first_label: int = 1) -> TFRecords:
    """The same images by the same ids in TFRecord files."""
    parts = np.array_split(np.arange(len(source)), files)
    for i, ids in enumerate(parts):
        images = ((source.read(id), int(source.labels[id]) + first_label) for id in ids.tolist())
        (root / f"{split}-{i:05}-of-{files:05}").write_bytes(tfrecords(images))
    return TFRecords.scan(f"{root}/{split}-*-of-*")


@pytest.fixture
def folders(tmp_path: Path) -> LabeledFiles:
    """30 photographs of 3 classes."""
    return folder(tmp_path / "folders", SAMPLES, {})


@pytest.fixture
def records(tmp_path: Path, folders: LabeledFiles) -> TFRecords:
    return pack(tmp_path, folders)


# ----------------------------------------------------------------------------------------------------------------------
# Naming files


def test_what_names_tfrecord_files(tmp_path: Path) -> None:
    for data in (
        *("train-*-of-*", "train-*-of-01024", "train-00000-of-01024", "train-{00000..00099}-of-01024", "d/t-of-1{0,1}"),
        *("a.tfrecord", "a.tfrecords", "a-*.tfrec", "imagenet-train.tfrecord-*-of-01024", "s3://b/{0..9}.tfrecord"),
    ):
        assert names_tfrecords(data), data
    (tmp_path / "a.tfrecord").mkdir()
    for data in ("train", "king-of-spain", "x-of-1.tar", "of-1/train.csv", "a.tar", f"{tmp_path}/a.tfrecord", ""):
        assert not names_tfrecords(data), data


def test_training_and_validation(tmp_path: Path, folders: LabeledFiles) -> None:
    pack(tmp_path, folders)
    pack(tmp_path, folders.drop(range(20)), 1, "validation")
    train, val = train_and_val(f"{tmp_path}/train-*-of-*", f"{tmp_path}/validation-*-of-*")
    assert isinstance(train, TFRecords) and isinstance(val, TFRecords)
    assert len(train) == SAMPLES and train.classes == val.classes == ("1", "2", "3")
    assert train.labels.tolist() == folders.labels.tolist() and val.labels.tolist() == folders.labels[20:].tolist()
    with pytest.raises(UsageError, match=mentioning("--data -of-* --val-data")):
        train_and_val(f"{tmp_path}/train-*-of-*")
    with pytest.raises(UsageError, match=mentioning("--root /x")):
        train_and_val(f"{tmp_path}/train-*-of-*", f"{tmp_path}/validation-*-of-*", "/x")
    pack(tmp_path, folders, 1, "validation", first_label=0)
    with pytest.raises(UsageError, match=mentioning("labels training '0'")):
        train_and_val(f"{tmp_path}/train-*-of-*", f"{tmp_path}/validation-*-of-*")


# ----------------------------------------------------------------------------------------------------------------------
# The stream


def pixels(
    source: LabeledSource, name: LoaderName, rank: int = 0, world_size: int = 1, start: int = 0, steps: int = 99
) -> dict[tuple[int, int], tuple[int, torch.Tensor]]:
    """Label and image, by epoch and id."""
    found: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "start": start, "threads": 2}
    with make_loader(name, source, TRAIN, STREAM, **options) as loader:
        for batch in loader:
            if batch.micro_batch.step < start + steps:
                keys = zip(batch.micro_batch.epochs.tolist(), batch.ids.tolist(), strict=True)
                for key, label, image in zip(keys, batch["labels"].tolist(), batch["images"].clone(), strict=True):
                    assert key not in found
                    found[key] = label, image
    return found


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_batches_are_those_of_class_folders(records: TFRecords, folders: LabeledFiles, name: LoaderName) -> None:
    assert [records.read(id) for id in range(SAMPLES)] == [folders.read(id) for id in range(SAMPLES)]
    ours, theirs = pixels(records, name), pixels(folders, name)
    assert ours.keys() == theirs.keys() == {(epoch, id) for epoch in range(2) for id in range(SAMPLES)}
    for key, (label, image) in ours.items():
        assert label == theirs[key][0] == folders.labels[key[1]] and torch.equal(image, theirs[key][1])


def test_every_image_once_across_a_resume_on_other_workers(records: TFRecords) -> None:
    whole = pixels(records, "dali")
    shared: list[tuple[tuple[int, int], tuple[int, torch.Tensor]]] = []
    for world_size, start, steps in ((1, 0, 2), (2, 2, 3), (3, 5, 5)):
        for rank in range(world_size):
            shared += pixels(records, "dali", rank, world_size, start, steps).items()
    assert Counter(key for key, _ in shared) == Counter([*whole])
    assert all(torch.equal(image, whole[key][1]) for key, (_, image) in shared)


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_a_broken_image_is_named_and_replaced(tmp_path: Path, folders: LabeledFiles, name: LoaderName) -> None:
    for id, kind in ((4, "cut-short"), (17, "empty"), (23, "text")):
        Path(folders.path(id)).write_bytes(CONTENTS[kind](folders.read(id)))
    records = pack(tmp_path, folders)
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader(name, records, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            one = batch.micro_batch
            assert batch["labels"].tolist() == folders.labels[one.read_ids].tolist()
            for id, epoch, read in zip(one.ids.tolist(), one.epochs.tolist(), one.read_ids.tolist(), strict=True):
                tried = (substitute(STREAM.seed, epoch, id, attempt, SAMPLES) for attempt in range(9))
                assert read == (next(other for other in tried if other not in (4, 17, 23)) if id in (4, 17, 23) else id)
    assert quarantine.known.keys() == {4, 17, 23}
    assert quarantine.known[17].path == f"{tmp_path}/train-00001-of-00003#7"


def test_a_file_that_changed_ends_the_run(records: TFRecords, tmp_path: Path) -> None:
    (tmp_path / "train-00001-of-00003").write_bytes(b"shorter")
    with (
        make_loader("dali", records, VALIDATION, OrderedPass(samples=SAMPLES, batch_size=8)) as loader,
        pytest.raises(DataError, match=mentioning("train-00001-of-00003# 7")),
    ):
        list(loader)


# ----------------------------------------------------------------------------------------------------------------------
# Commands and jobs


def test_verify_and_exclude(tmp_path: Path, folders: LabeledFiles, capsys: pytest.CaptureFixture[str]) -> None:
    Path(folders.path(14)).write_bytes(CONTENTS["cut-short"](folders.read(14)))
    records = pack(tmp_path, folders)
    data, output = f"{tmp_path}/train-*-of-*", tmp_path / "broken.txt"
    with pytest.raises(DataError, match=mentioning("1 30 broken")):
        verify(Verify(data=data, output=str(output), workers=1))
    assert mentions(capsys.readouterr().out, f"{tmp_path}/train-00001-of-00003#4")
    (rest,) = exclude(str(output), records)
    kept = [id for id in range(SAMPLES) if id != 14]
    assert [rest.path(id) for id in range(29)] == [records.path(id) for id in kept]
    assert [rest.read(id) for id in range(29)] == [records.read(id) for id in kept]
    assert rest.labels.tolist() == records.labels[kept].tolist() and rest.fingerprint != records.fingerprint
    output.write_text("train-00000-of-00003#0\n")
    assert exclude(str(output), records)[0].path(0) == records.path(1)


@pytest.mark.usefixtures("records")
def test_preview(tmp_path: Path) -> None:
    output = tmp_path / "sheet.png"
    of_job = "--data", f"{tmp_path}/train-*-of-*", "--val-fraction", "0.3", "--batch-size", "1"
    preview(Preview(of_job=of_job, output=str(output), device="cpu"))
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("records")
def test_they_are_not_copied(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("train-*-of-*")):
        prepare(Prepare(source=f"{tmp_path}/train-*-of-*", target=str(tmp_path / "copy")))


def test_a_run_of_the_job(tmp_path: Path) -> None:
    digits = digits_data()
    third = digits.train.drop(np.flatnonzero(np.arange(len(digits.train)) % 3).tolist())
    pack(tmp_path, third)
    pack(tmp_path, digits.val, 2, "validation")
    data = Data(*train_and_val(f"{tmp_path}/train-*-of-*", f"{tmp_path}/validation-*-of-*"))
    config, run = replace(SHORT, data="elsewhere"), folder_of(tmp_path)
    run_ranks(2, partial(train_rank, train), config, data, run)
    assert_whole(run, config.stream(len(third)))
    assert [row["validation"]["images"] for row in run.rows("epochs.jsonl")] == [360, 360]


def test_files_in_s3(s3: PutObjects, records: TFRecords, tmp_path: Path) -> None:
    s3("records", {f"data/{name}": (tmp_path / name).read_bytes() for name in records.shards})
    remote = labeled_images("s3://records/data/train-*-of-00003")
    assert isinstance(remote, TFRecords) and remote.fingerprint == records.fingerprint
    assert remote.path(12) == "s3://records/data/train-00001-of-00003#2"
    ids = np.random.default_rng(0).permutation(SAMPLES)
    assert [content.tobytes() for content in remote.files(ids)] == [records.read(id) for id in ids.tolist()]
    with pytest.raises(UsageError, match=mentioning("s3://nobucket")):
        labeled_images("s3://nobucket/train-{0..3}.tfrecord")
