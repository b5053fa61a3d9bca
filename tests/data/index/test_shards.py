"""Images in tar, TFRecord and Parquet files, read at random and in the stream as those of class folders are."""

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
from raydali.data.broken.quarantine import Quarantine, substitute
from raydali.data.index.exclusion import exclude
from raydali.data.index.formats import labeled_images, train_and_val
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.index.shards import Shards
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, folder
from tests.support.digits import SHORT, digits_data
from tests.support.job_ranks import train_rank
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.parquets import packed_in_parquet
from tests.support.quick import first_quick
from tests.support.ranks import folder_of, run_ranks
from tests.support.tars import packed
from tests.support.tfrecords import tfrecords
from tests.support.traces import assert_whole
from tests.support.trees import bytes_of

SAMPLES = 30
TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=2, global_batch_size=6, seed=1)

pytestmark = pytest.mark.usefixtures("tar_cache")

of_each_format = pytest.mark.parametrize("format", ["tar", "tfrecord", "parquet"])


def pack(format: str, root: Path, source: LabeledSource, files: int = 3, split: str = "train") -> str:
    """The same images by the same ids in so many files, the 4th of the second file as 000013; returns the pattern."""
    if format == "parquet":
        return packed_in_parquet(root, source, files, split)
    for number, ids in enumerate(np.array_split(np.arange(len(source)), files)):
        name, images = f"{split}-{number:05}-of-{files:05}", [(id, int(source.labels[id])) for id in ids.tolist()]
        if format == "tar":
            content = packed({f"{source.classes[label]}/{id:06}.jpg": source.read(id) for id, label in images})
            (root / f"{name}.tar").write_bytes(content)
        else:
            (root / name).write_bytes(tfrecords((source.read(id), label + 1) for id, label in images))
    return f"{root}/{split}-*.tar" if format == "tar" else f"{root}/{split}-*-of-*"


@pytest.fixture
def folders(tmp_path: Path) -> LabeledFiles:
    """30 photographs of 3 classes."""
    return folder(tmp_path / "folders", SAMPLES, {})


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


@pytest.mark.parametrize(
    ("format", "name"),
    [
        *((format, "dali") for format in ("tar", "tfrecord", "parquet")),
        *(pytest.param(format, "torch", marks=pytest.mark.slow) for format in ("tar", "tfrecord", "parquet")),
    ],
)
def test_every_image_once_across_a_resume_on_other_workers(
    tmp_path: Path, folders: LabeledFiles, format: str, name: LoaderName
) -> None:
    images = labeled_images(pack(format, tmp_path, folders))
    assert [images.read(id) for id in range(SAMPLES)] == [folders.read(id) for id in range(SAMPLES)]
    whole = pixels(folders, name)
    assert whole.keys() == {(epoch, id) for epoch in range(2) for id in range(SAMPLES)}
    shared: list[tuple[tuple[int, int], tuple[int, torch.Tensor]]] = []
    for world_size, start, steps in ((1, 0, 2), (2, 2, 3), (3, 5, 5)):
        for rank in range(world_size):
            shared += pixels(images, name, rank, world_size, start, steps).items()
    assert Counter(key for key, _ in shared) == Counter([*whole])
    for key, (label, image) in shared:
        assert label == folders.labels[key[1]] and torch.equal(image, whole[key][1])


@of_each_format
@first_quick("name", ["dali", "torch"])
def test_a_broken_image_is_named_and_replaced(
    tmp_path: Path, folders: LabeledFiles, format: str, name: LoaderName
) -> None:
    for id, kind in ((4, "cut-short"), (17, "empty"), (23, "text")):
        Path(folders.path(id)).write_bytes(CONTENTS[kind](folders.read(id)))
    images, quarantine = labeled_images(pack(format, tmp_path, folders)), Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader(name, images, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            one = batch.micro_batch
            assert batch["labels"].tolist() == folders.labels[one.read_ids].tolist()
            for id, epoch, read in zip(one.ids.tolist(), one.epochs.tolist(), one.read_ids.tolist(), strict=True):
                tried = (substitute(STREAM.seed, epoch, id, attempt, SAMPLES) for attempt in range(9))
                assert read == (next(other for other in tried if other not in (4, 17, 23)) if id in (4, 17, 23) else id)
    assert quarantine.known.keys() == {4, 17, 23}
    assert quarantine.known[17].path == images.path(17) and "train-00001-of-00003" in images.path(17)


@of_each_format
def test_a_file_that_changed_ends_the_run(tmp_path: Path, folders: LabeledFiles, format: str) -> None:
    images = labeled_images(pack(format, tmp_path, folders))
    assert isinstance(images, Shards)
    (tmp_path / images.shards[1]).write_bytes(b"shorter")
    with (
        make_loader("dali", images, VALIDATION, OrderedPass(samples=SAMPLES, batch_size=8)) as loader,
        pytest.raises(DataError, match=mentioning("train-00001-of-00003 7")),
    ):
        list(loader)


@of_each_format
def test_verify_and_exclude(
    tmp_path: Path, folders: LabeledFiles, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(folders.path(14)).write_bytes(CONTENTS["cut-short"](folders.read(14)))
    data, output = pack(format, tmp_path, folders), tmp_path / "broken.txt"
    images = labeled_images(data)
    with pytest.raises(DataError, match=mentioning("1 30 broken")):
        verify(Verify(data=data, output=str(output), workers=1))
    assert mentions(capsys.readouterr().out, images.path(14))
    (rest,) = exclude(str(output), images)
    kept = [id for id in range(SAMPLES) if id != 14]
    if format == "parquet":
        kept = [*range(10), *range(15, SAMPLES), *range(10, 14)]  # behind the row groups that are whole
    assert [rest.path(id) for id in range(29)] == [images.path(id) for id in kept]
    assert [rest.read(id) for id in range(29)] == [images.read(id) for id in kept]
    assert rest.labels.tolist() == images.labels[kept].tolist() and rest.fingerprint != images.fingerprint
    output.write_text(f"{images.path(0).removeprefix(f'{tmp_path}/')}\n")
    assert images.path(0) not in map(exclude(str(output), images)[0].path, range(29))


def test_they_are_previewed_and_copied(tmp_path: Path, folders: LabeledFiles) -> None:
    data, output = pack("tfrecord", tmp_path, folders), tmp_path / "sheet.png"
    of_job = "--data", data, "--val-fraction", "0.3", "--batch-size", "1"
    preview(Preview(of_job=of_job, output=str(output), device="cpu"))
    assert output.read_bytes().startswith(b"\x89PNG")
    prepare(Prepare(source=data, target=str(tmp_path / "copy"), shorter_side=0))
    assert len(LabeledFiles.scan(str(tmp_path / "copy"))) == len(folders)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["tfrecord", "parquet"])
def test_a_run_of_the_job(tmp_path: Path, format: str) -> None:
    digits = digits_data()
    third = digits.train.drop(np.flatnonzero(np.arange(len(digits.train)) % 3).tolist())
    data = pack(format, tmp_path, third), pack(format, tmp_path, digits.val, 2, "validation")
    config, run = replace(SHORT, data="elsewhere"), folder_of(tmp_path)
    run_ranks(2, partial(train_rank, train), config, Data(*train_and_val(*data)), run)
    assert_whole(run, config.stream(len(third)))
    assert [row["validation"]["images"] for row in run.rows("epochs.jsonl")] == [360, 360]


@of_each_format
def test_files_in_s3(s3: PutObjects, tmp_path: Path, folders: LabeledFiles, format: str) -> None:
    data = pack(format, tmp_path, folders)
    images, bucket = labeled_images(data), f"packed-{format}"
    assert isinstance(images, Shards)
    s3(bucket, {f"data/{name}": (tmp_path / name).read_bytes() for name in images.shards})
    remote = labeled_images(f"s3://{bucket}/data/{data.removeprefix(f'{tmp_path}/')}")
    assert isinstance(remote, type(images)) and remote.fingerprint == images.fingerprint
    assert remote.path(12) == images.path(12).replace(str(tmp_path), f"s3://{bucket}/data")
    ids = np.random.default_rng(0).permutation(SAMPLES)
    assert bytes_of(remote.contents(ids)) == [images.read(id) for id in ids.tolist()]
    with pytest.raises(UsageError, match=mentioning("s3://nobucket")):
        labeled_images(data.replace(str(tmp_path), "s3://nobucket"))
