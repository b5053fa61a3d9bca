"""The resident loader: pixels, labels and substitutes are the torch loader's, and what does not fit is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from jobs.imagenet import DIGITS
from jobs.video import Config as Video
from raydali.data.augment.augmentation import Augmentation
from raydali.data.loading.loader import Loader
from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.loading.quarantine import Quarantine
from raydali.data.loading.resident_loader import check_memory
from raydali.data.sources.idx import IdxImages
from raydali.data.sources.labeled import LabeledSource
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import ImageSizes, TrainImages, ValidationImages
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import DataError, UsageError
from tests.support.idx_files import pictures, write_idx
from tests.support.messages import mentioning
from tests.support.pictures import encoded, files, photograph

STREAM = Stream(samples=30, epochs=2, batch_size=3, global_batch_size=6, seed=1, repeats=2)
PASS = OrderedPass(samples=30, batch_size=8)
WHOLE = TrainImages(image_size=28, seed=3, random_area=(1, 1), augmentation=Augmentation("shift:4", erase=0.3))


def images(folder: Path, height: int, width: int) -> IdxImages:
    return IdxImages.scan(str(write_idx(folder, "train", pictures(30, height, width), np.arange(30, dtype=np.uint8))))


def loader(name: LoaderName, source: LabeledSource, pipeline: Pipeline[Any], order: Any, **options: Any) -> Loader:
    return make_loader(name, source, pipeline, order, threads=2, **options)


def pixels(name: LoaderName, source: LabeledSource, pipeline: Pipeline[Any], order: Any, **options: Any) -> Any:
    """The images and labels of all batches, and their ids."""
    with loader(name, source, pipeline, order, **options) as made:
        batches = [*made]
    both = [torch.cat([batch[part] for batch in batches]).numpy() for part in ("images", "labels")]
    return *both, np.concatenate([batch.micro_batch.read_ids for batch in batches])


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_images_are_exactly_the_torch_loaders(tmp_path: Path, world_size: int) -> None:
    source = images(tmp_path, 28, 28)
    for rank in range(world_size):
        ours, theirs = (
            pixels(name, source, WHOLE, STREAM, rank=rank, world_size=world_size) for name in ("resident", "torch")
        )
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def assert_within_1(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> None:
    """Some pixels lie halfway between two values, which Pillow's fixed-point weights round up or down."""
    difference = ours.astype(int) - theirs
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() < 0.1
    assert abs(difference.mean()) < 0.01


@pytest.mark.parametrize("size", [20, 32])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_crops_are_pillows(tmp_path: Path, size: int, interpolation: Any) -> None:
    source = images(tmp_path, 31, 26)
    train = TrainImages(image_size=size, seed=3, random_area=(0.1, 1), interpolation=interpolation)
    validation = ValidationImages(image_size=size, interpolation=interpolation)
    exact = ValidationImages(image_size=26, resize_size=26)
    for pipeline, order in ((train, STREAM), (validation, PASS), (exact, PASS)):
        ours, theirs = (pixels(name, source, pipeline, order) for name in ("resident", "torch"))
        assert_within_1(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_sizes_follow_the_epoch(tmp_path: Path) -> None:
    source = images(tmp_path, 28, 28)
    pipeline = replace(WHOLE, image_size=32, image_sizes=ImageSizes.parse("32:64@0-1"))
    order = replace(STREAM, batch_size=6)
    with loader("resident", source, pipeline, order) as ours, loader("torch", source, pipeline, order) as theirs:
        sides = []
        for batch, expected in zip(ours, theirs, strict=True):
            assert_within_1(batch["images"].numpy(), expected["images"].numpy())
            sides.append(batch["images"].shape[-1])
    assert {*sides} == {32, 64}


def test_broken_images_are_replaced_as_by_the_torch_loader(tmp_path: Path) -> None:
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (32, 32)), "PNG") for i in range(30)}
    source = files(tmp_path, **made | {"7": b"", "21": made["21"][:100]})
    pipeline = replace(WHOLE, image_size=32, augmentation=Augmentation())
    found = Quarantine(30, seed=5), Quarantine(30, seed=5)
    ours = pixels("resident", source, pipeline, STREAM, quarantine=lambda _: found[0])
    theirs = pixels("torch", source, pipeline, STREAM, quarantine=lambda _: found[1])
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[0].known == found[1].known
    assert {*found[0].known} == {7, 21}
    left = Quarantine(30)
    validation = ValidationImages(image_size=32, resize_size=32)
    assert len(pixels("resident", source, validation, PASS, quarantine=lambda _: left)[0]) == 28
    with pytest.raises(DataError, match=r"sample 7 cannot be read: .*7\.JPEG"):
        loader("resident", source, validation, PASS)


def test_images_of_several_sizes_are_refused(tmp_path: Path) -> None:
    sizes = [(32, 32)] * 3 + [(32, 30), (28, 32)]
    source = files(tmp_path, **{str(i): encoded(photograph(size=size), "PNG") for i, size in enumerate(sizes)})
    with pytest.raises(UsageError, match=mentioning("3.JPEG 32x30 0.JPEG 32x32 --loader resident")):
        loader("resident", source, WHOLE, replace(STREAM, samples=5, batch_size=2, global_batch_size=4, repeats=1))


def test_images_that_do_not_fit_are_refused() -> None:
    check_memory(10**9, 2 * 10**9)
    with pytest.raises(UsageError, match=mentioning("--loader resident 150 GB 80 GB")):
        check_memory(150 * 10**9, 80 * 10**9)


def test_other_jobs_are_refused() -> None:
    replace(DIGITS, loader="resident")
    with pytest.raises(UsageError, match=mentioning("--loader resident dali torch")):
        Video(loader="resident")
