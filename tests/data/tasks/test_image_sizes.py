"""Image sizes that follow the epoch: the schedule is FFCV's, and every loader gives each step its epoch's size."""

from dataclasses import replace
from typing import Unpack

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydali.data.augment.augmentation import Augmentation
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import Batch, LoaderOptions
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import ImageSizes, TrainImages, validation_size
from raydali.errors import UsageError
from tests.support.pictures import encoded, files, photograph

STREAM = Stream(samples=10, epochs=4, batch_size=2, global_batch_size=6, seed=1)
"""Steps 0..1 count to epoch 0, 2..3 to epoch 1, 4 to epoch 2 and 5 to epoch 3; the seams lie inside of steps."""
SIZES = ImageSizes.parse("32:96@0-2")
GROWING = TrainImages(image_size=32, seed=3, image_sizes=SIZES, augmentation=Augmentation("trivial", erase=0.3))


def resolution_of_ffcv(epoch: int, min_res: int, max_res: int, end_ramp: int, start_ramp: int) -> int:
    """The schedule as train_imagenet.py of github.com/libffcv/ffcv-imagenet has it."""
    if epoch <= start_ramp:
        return min_res
    if epoch >= end_ramp:
        return max_res
    interp = np.interp([epoch], [start_ramp, end_ramp], [min_res, max_res])
    return int(np.round(interp[0] / 32)) * 32


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 90), st.integers(1, 30))
def test_the_schedule_is_ffcvs(low: int, more: int, begin: int, length: int) -> None:
    sizes = ImageSizes(32 * low, 32 * (low + more), begin, begin + length)
    for epoch in range(begin + length + 3):
        assert sizes.at(epoch) == resolution_of_ffcv(epoch, sizes.first, sizes.last, sizes.end, sizes.begin)


def test_sizes_are_parsed() -> None:
    assert ImageSizes.parse("160:192@65-76") == ImageSizes(160, 192, 65, 76)
    assert ImageSizes.parse("160:192@65-76").all(90) == [160, 192]
    assert ImageSizes.parse("128:224@0-4").all(5) == [128, 160, 192, 224]
    assert ImageSizes.parse("100:110@0-2").all(3) == [100, 110]  # no multiple of 32 is between them
    assert ImageSizes.parse("224:128@0-2").all(3) == [224, 192, 128]
    assert ImageSizes.parse(224).all(3) == [224]
    assert validation_size({"image_size": "160:192@65-76", "val_image_size": None}) == 192
    assert validation_size({"image_size": 160, "val_image_size": 256}) == 256
    assert validation_size({}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("large", "large is neither a size such as 224, nor FIRST:LAST@EPOCH-EPOCH"),
        ("160:192", "160:192 is neither"),
        ("160:192@76", "160:192@76 is neither"),
        ("160:192@76-65", r"160:192@76-65 must begin before its end: try 160:192@76-77"),
        ("0:192@0-1", "must be at least 1, not 0"),
        (-3, "must be at least 1, not -3"),
    ],
)
def test_bad_sizes_are_named(given: int | str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageSizes.parse(given)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (60 + i, 90 - i))) for i in range(10)}
    return files(tmp_path_factory.mktemp("images"), **made)


def loaded(
    name: LoaderName, pipeline: TrainImages, source: LabeledFiles, **options: Unpack[LoaderOptions]
) -> dict[int, Batch]:
    """The batches by the number of the micro-batch."""
    with make_loader(name, source, pipeline, STREAM, **options) as loader:
        return {batch.micro_batch.number: batch for batch in loader}


@pytest.mark.parametrize("name", ["dali", pytest.param("torch", marks=pytest.mark.slow)])
def test_each_step_has_the_pixels_of_its_epochs_size(name: LoaderName, source: LabeledFiles) -> None:
    """They are those of a run whose images always have this size, on one rank or on three, and after a resume."""
    grown = loaded(name, GROWING, source)
    assert {number: batch["images"].shape[-1] for number, batch in grown.items()} == {
        number: SIZES.at(STREAM.epoch_of(number // 3)) for number in range(3 * STREAM.steps)
    }
    assert {batch["images"].shape[-1] for batch in grown.values()} == {32, 64, 96}
    for size in SIZES.all(4):
        plain = loaded(name, replace(GROWING, image_size=size, image_sizes=None), source)
        for number, batch in grown.items():
            if batch["images"].shape[-1] == size:
                assert torch.equal(batch["images"], plain[number]["images"])
                assert torch.equal(batch["labels"], plain[number]["labels"])
    elsewhere = [loaded(name, GROWING, source, rank=rank, world_size=3, start=3) for rank in range(3)]
    numbers = sorted(number for batches in elsewhere for number in batches)
    assert numbers == [*range(9, 3 * STREAM.steps)]
    for batches in elsewhere:
        for number, batch in batches.items():
            assert torch.equal(batch["images"], grown[number]["images"])


def test_resident_batches_have_the_epochs_size(source: LabeledFiles) -> None:
    with make_loader("synthetic", source, GROWING, STREAM) as loader:
        assert [loader.resident_batch(2, epoch)["images"].shape for epoch in range(4)] == [
            (2, 3, size, size) for size in (32, 64, 96, 96)
        ]
        assert [batch["images"].shape[-1] for batch in loader] == [
            SIZES.at(batch.micro_batch.counts_to) for batch in loader
        ]
