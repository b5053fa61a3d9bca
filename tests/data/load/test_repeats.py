"""Repeats through real pipelines: other pixels each time, alike on any ranks, by both loaders, and broken ones too."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from raydali.data.augment.augmentation import Augmentation
from raydali.data.broken.quarantine import Quarantine, substitute
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import LoaderOptions
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from tests.support.broken import KINDS, folder
from tests.support.pictures import assert_like_pillow
from tests.support.quick import first_quick

BROKEN = {5: KINDS[0], 11: KINDS[1]}
STREAM = Stream(samples=24, epochs=3, batch_size=2, global_batch_size=4, seed=5, repeats=3)
TRAIN = TrainImages(image_size=32, seed=5, augmentation=Augmentation("shift:4"))
DECODING: tuple[LoaderName, ...] = ("dali", "torch")

Images = dict[tuple[int, int], torch.Tensor]
"""Pixels by draw key and id."""
Loaded = Callable[[LoaderName], tuple[Images, dict[tuple[int, int], int]]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    return folder(tmp_path_factory.mktemp("repeats"), STREAM.samples, BROKEN)


def load(
    name: LoaderName, source: LabeledFiles, rank: int = 0, world_size: int = 1, start: int = 0
) -> tuple[Images, dict[tuple[int, int], int]]:
    """The images, and what replaced broken ones."""
    quarantine = Quarantine(len(source), seed=STREAM.seed)
    options = LoaderOptions(rank=rank, world_size=world_size, start=start, threads=2, quarantine=lambda _: quarantine)
    images, replaced = Images(), dict[tuple[int, int], int]()
    with make_loader(name, source, TRAIN, STREAM, **options) as loader:
        for batch in loader:
            one = batch.micro_batch
            keys = zip(one.draw_keys.tolist(), one.ids.tolist(), strict=True)
            for key, read, image in zip(keys, one.read_ids.tolist(), batch["images"], strict=True):
                images[key] = image.clone()
                if read != key[1]:
                    replaced[key] = read
    return images, replaced


@pytest.fixture(scope="module")
def whole(source: LabeledFiles) -> Loaded:
    return cache(lambda name: load(name, source))


def alike(images: Images, others: Images) -> bool:
    return images.keys() == others.keys() and all(torch.equal(image, others[key]) for key, image in images.items())


@first_quick("name", DECODING)
def test_each_repeat_has_pixels_of_its_own(whole: Loaded, name: LoaderName) -> None:
    images, _ = whole(name)
    assert len(images) == 3 * 24
    for id in range(24):
        copies = [image for (_, each), image in images.items() if each == id]
        assert len(copies) == 3
        assert not any(torch.equal(copies[a], copies[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_the_first_repeat_has_the_pixels_of_its_epoch(source: LabeledFiles, whole: Loaded) -> None:
    images, _ = whole("torch")
    firsts = {key: image for key, image in images.items() if key[0] < 1 << 32 and key[1] not in BROKEN}
    assert len(firsts) == 22
    for (epoch, id), image in firsts.items():
        tensors = zip(TRAIN.outputs, TRAIN.sample(source, id, epoch), strict=True)
        assert torch.equal(image, TRAIN.finish({name: tensor[None] for name, tensor in tensors})["images"][0])


@first_quick("name", DECODING)
def test_pixels_depend_neither_on_ranks_nor_on_the_start(source: LabeledFiles, whole: Loaded, name: LoaderName) -> None:
    images, replaced = whole(name)
    of_ranks = [load(name, source, rank, 2) for rank in range(2)]
    assert alike(of_ranks[0][0] | of_ranks[1][0], images) and of_ranks[0][1] | of_ranks[1][1] == replaced
    later, _ = load(name, source, start=7)
    assert len(later) == 72 - 28 and alike(later, {key: images[key] for key in later})


def test_loaders_agree_and_each_repeat_of_a_broken_sample_has_its_substitute(whole: Loaded) -> None:
    (by_dali, replaced), (by_torch, others) = whole("dali"), whole("torch")
    assert by_dali.keys() == by_torch.keys() and replaced == others and len(replaced) == 3 * len(BROKEN)
    ours, theirs = (torch.stack([images[key] for key in by_dali]) for images in (by_dali, by_torch))
    assert_like_pillow(ours, theirs)
    for (key, id), read in replaced.items():
        tried = [substitute(STREAM.seed, key, id, attempt, 24) for attempt in range(9)]
        assert read == next(other for other in tried if other not in BROKEN)
