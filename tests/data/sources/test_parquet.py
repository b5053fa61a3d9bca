"""Parquet files by name, read at random, and in the stream: as class folders of the same images are."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.imagenet import Data, train
from raydali.commands.preview import Preview
from raydali.commands.preview import main as preview
from raydali.commands.verify import Verify
from raydali.commands.verify import main as verify
from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.loading.quarantine import Quarantine, substitute
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.formats import labeled_images, train_and_val
from raydali.data.sources.labeled import LabeledFiles, LabeledSource
from raydali.data.sources.parquet import Parquet
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, folder
from tests.support.digits import SHORT, digits_data
from tests.support.job_ranks import train_rank
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.parquets import packed_in_parquet, write_parquet
from tests.support.ranks import folder_of, run_ranks
from tests.support.traces import assert_whole

SAMPLES = 30
TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=2, global_batch_size=6, seed=1)

pytestmark = pytest.mark.usefixtures("tar_cache")


@pytest.fixture
def folders(tmp_path: Path) -> LabeledFiles:
    """30 photographs of 3 classes."""
    return folder(tmp_path / "folders", SAMPLES, {})


@pytest.fixture
def images(tmp_path: Path, folders: LabeledFiles) -> Parquet:
    """The same in 3 files of 10 rows, of which 5 are in a row group."""
    return Parquet.scan(packed_in_parquet(tmp_path, folders))


# ----------------------------------------------------------------------------------------------------------------------
# Naming files


def test_training_and_validation(tmp_path: Path, folders: LabeledFiles) -> None:
    data = packed_in_parquet(tmp_path, folders)
    val_data = packed_in_parquet(tmp_path, folders.drop(range(20)), 1, "validation")
    train, val = train_and_val(data, val_data)
    assert isinstance(train, Parquet) and isinstance(val, Parquet)
    assert len(train) == SAMPLES and train.classes == val.classes == folders.classes
    assert train.labels.tolist() == folders.labels.tolist() and val.labels.tolist() == folders.labels[20:].tolist()
    with pytest.raises(UsageError, match=mentioning(f"--data {data} --val-data --val-fraction 0.1")):
        train_and_val(data)
    with pytest.raises(UsageError, match=mentioning("--root /x")):
        train_and_val(data, val_data, "/x")
    with pytest.raises(UsageError, match=mentioning(f"--multi-label {data}")):
        train_and_val(data, val_data, multi_label=True)
    with pytest.raises(UsageError, match=mentioning(f"--image-column x {folders.root}")):
        train_and_val(folders.root, image_column="x")
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", [b""], [0], names=["cow"])
    with pytest.raises(UsageError, match=mentioning("labels training 'cow'")):
        train_and_val(data, val_data)


def test_a_share_that_validates(tmp_path: Path, folders: LabeledFiles) -> None:
    train, val = train_and_val(packed_in_parquet(tmp_path, folders), val_fraction=0.2)
    assert {*train.relative_paths()} | {*val.relative_paths()} == {
        f"train-{id // 10:05}-of-00003.parquet#{id % 10}" for id in range(SAMPLES)
    }
    assert len(train) + len(val) == SAMPLES and {*val.labels.tolist()} == {0, 1, 2}
    for part in (train, val):
        numbers = [int(path[6:11]) * 10 + int(path.rpartition("#")[2]) for path in part.relative_paths()]
        assert [part.read(id) for id in range(len(part))] == [folders.read(number) for number in numbers]


def test_a_cloned_data_set(tmp_path: Path, folders: LabeledFiles) -> None:
    clone = tmp_path / "clone"
    data, val_data = (
        packed_in_parquet(clone / "data", part, 2, split)
        for part, split in ((folders, "train"), (folders.drop(range(20)), "validation"))
    )
    packed_in_parquet(clone / "data", folders.drop(range(25)), 1, "test")
    (clone / "README.md").touch()
    for folder_ in (clone, clone / "data"):
        train, val = train_and_val(str(folder_))
        assert [each.fingerprint for each in (train, val)] == [
            Parquet.scan(each).fingerprint for each in (data, val_data)
        ]
        with pytest.raises(UsageError, match=mentioning(f"{folder_} train '{clone}/data/")):
            labeled_images(str(folder_))
        with pytest.raises(UsageError, match=mentioning(f"--data {folder_} --data '{data}' --val-fraction 0.3")):
            train_and_val(str(folder_), val_fraction=0.3)
    assert len(train_and_val(str(clone), image_column="image", label_column="label")[0]) == SAMPLES


def test_folders_of_files(tmp_path: Path, folders: LabeledFiles) -> None:
    for split in ("train", "val"):
        packed_in_parquet(tmp_path / "sets" / split, folders, 2, "0")
    train, _ = train_and_val(str(tmp_path / "sets"))
    assert isinstance(train, Parquet) and train.shards == ("0-00000-of-00002.parquet", "0-00001-of-00002.parquet")
    only = packed_in_parquet(tmp_path / "one", folders, 1)
    with pytest.raises(UsageError, match=mentioning(f"--data {tmp_path}/one '{only}' --val-data --val-fraction 0.1")):
        train_and_val(str(tmp_path / "one"))
    assert [len(part) > 0 for part in train_and_val(str(tmp_path / "one"), val_fraction=0.5)] == [True, True]
    assert len(labeled_images(f"{tmp_path}/one/")) == SAMPLES


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
def test_every_image_once_across_a_resume_on_other_workers(
    images: Parquet, folders: LabeledFiles, name: LoaderName
) -> None:
    whole = pixels(folders, name)
    assert whole.keys() == {(epoch, id) for epoch in range(2) for id in range(SAMPLES)}
    shared: list[tuple[tuple[int, int], tuple[int, torch.Tensor]]] = []
    for world_size, start, steps in ((1, 0, 2), (2, 2, 3), (3, 5, 5)):
        for rank in range(world_size):
            shared += pixels(images, name, rank, world_size, start, steps).items()
    assert Counter(key for key, _ in shared) == Counter([*whole])
    for key, (label, image) in shared:
        assert label == folders.labels[key[1]] and torch.equal(image, whole[key][1])


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_broken_and_missing_images_are_named_and_replaced(
    tmp_path: Path, folders: LabeledFiles, name: LoaderName
) -> None:
    contents: list[bytes | None] = [folders.read(id) for id in range(SAMPLES)]
    contents[4], contents[17], contents[23] = CONTENTS["cut-short"](folders.read(4)), None, b"<html>" * 99
    path = write_parquet(tmp_path / "a.parquet", contents, folders.labels.tolist(), rows=7)
    images, quarantine = Parquet.scan(str(path)), Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader(name, images, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            one = batch.micro_batch
            assert batch["labels"].tolist() == folders.labels[one.read_ids].tolist()
            for id, epoch, read in zip(one.ids.tolist(), one.epochs.tolist(), one.read_ids.tolist(), strict=True):
                tried = (substitute(STREAM.seed, epoch, id, attempt, SAMPLES) for attempt in range(9))
                assert read == (next(other for other in tried if other not in (4, 17, 23)) if id in (4, 17, 23) else id)
    assert quarantine.known.keys() == {4, 17, 23}
    assert quarantine.known[17].path == f"{path}#17"


def test_a_damaged_row_group_is_broken_samples(tmp_path: Path, folders: LabeledFiles) -> None:
    from pyarrow.parquet import read_metadata

    images = Parquet.scan(packed_in_parquet(tmp_path, folders))
    file = tmp_path / images.shards[1]
    content, column = bytearray(file.read_bytes()), read_metadata(file).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + 40] = b"\xff" * 40
    file.write_bytes(content)
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    with make_loader("dali", images, TRAIN, STREAM, quarantine=lambda _: quarantine) as loader:
        assert sum(len(batch.ids) for batch in loader) == 2 * SAMPLES
    assert quarantine.known.keys() == {15, 16, 17, 18, 19}
    assert mentions(str(quarantine.known[15]), f"{file}#5 row group 1 damaged")


def test_a_file_that_changed_ends_the_run(images: Parquet, tmp_path: Path) -> None:
    (tmp_path / images.shards[1]).write_bytes(b"shorter")
    with (
        make_loader("dali", images, VALIDATION, OrderedPass(samples=SAMPLES, batch_size=8)) as loader,
        pytest.raises(DataError, match=mentioning("train-00001-of-00003.parquet 7")),
    ):
        list(loader)


# ----------------------------------------------------------------------------------------------------------------------
# Commands and jobs


def test_verify_and_exclude(tmp_path: Path, folders: LabeledFiles, capsys: pytest.CaptureFixture[str]) -> None:
    Path(folders.path(14)).write_bytes(CONTENTS["cut-short"](folders.read(14)))
    data, output = packed_in_parquet(tmp_path, folders), tmp_path / "broken.txt"
    images = Parquet.scan(data)
    with pytest.raises(DataError, match=mentioning("1 30 broken")):
        verify(Verify(data=data, output=str(output), workers=1))
    assert mentions(capsys.readouterr().out, f"{tmp_path}/train-00001-of-00003.parquet#4")
    (rest,) = exclude(str(output), images)
    kept = [*range(10), *range(15, SAMPLES), *range(10, 14)]  # behind the row groups that are whole
    assert [rest.path(id) for id in range(29)] == [images.path(id) for id in kept]
    assert [rest.read(id) for id in range(29)] == [images.read(id) for id in kept]
    assert rest.labels.tolist() == images.labels[kept].tolist() and rest.fingerprint != images.fingerprint


@pytest.mark.usefixtures("images")
def test_preview(tmp_path: Path) -> None:
    output = tmp_path / "sheet.png"
    of_job = "--data", f"{tmp_path}/train-*.parquet", "--val-fraction", "0.3", "--batch-size", "1"
    preview(Preview(of_job=of_job, output=str(output), device="cpu"))
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_of_the_job(tmp_path: Path) -> None:
    digits = digits_data()
    third = digits.train.drop(np.flatnonzero(np.arange(len(digits.train)) % 3).tolist())
    data = packed_in_parquet(tmp_path, third, rows=50)
    val_data = packed_in_parquet(tmp_path, digits.val, 2, "validation", rows=50)
    config, run = replace(SHORT, data="elsewhere"), folder_of(tmp_path)
    run_ranks(2, partial(train_rank, train), config, Data(*train_and_val(data, val_data)), run)
    assert_whole(run, config.stream(len(third)))
    assert [row["validation"]["images"] for row in run.rows("epochs.jsonl")] == [360, 360]


def test_files_in_s3(s3: PutObjects, images: Parquet, tmp_path: Path) -> None:
    s3("parquet", {f"data/{name}": (tmp_path / name).read_bytes() for name in images.shards})
    remote = labeled_images("s3://parquet/data/train-*.parquet")
    assert isinstance(remote, Parquet) and remote.fingerprint == images.fingerprint
    assert remote.path(12) == "s3://parquet/data/train-00001-of-00003.parquet#2"
    ids = np.random.default_rng(0).permutation(SAMPLES)
    assert [content.tobytes() for content in remote.files(ids)] == [images.read(id) for id in ids.tolist()]
    with pytest.raises(UsageError, match=mentioning("s3://nobucket")):
        labeled_images("s3://nobucket/train-{0..3}.parquet")
