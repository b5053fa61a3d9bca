"""Graphs of one's own with `if`s on data, and with DALI's automatic augmentations, which are made of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import fn
from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment

from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.pictures import encoded, files, photograph

STREAM = Stream(samples=12, epochs=2, batch_size=4, global_batch_size=4, seed=0)


class Flipped(TrainImages):
    conditionals = True

    def augment(self, images: Any) -> Any:
        if fn.random.coin_flip():
            images = fn.flip(images, horizontal=0, vertical=1)
        return images

    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        return self.augment(images), labels


class Unasked(Flipped):
    conditionals = False


class Rand(Flipped):
    def augment(self, images: Any) -> Any:
        return rand_augment.rand_augment(images, n=2, m=9)


class Trivial(Flipped):
    def augment(self, images: Any) -> Any:
        return trivial_augment.trivial_augment_wide(images)


class Auto(Flipped):
    def augment(self, images: Any) -> Any:
        return auto_augment.auto_augment(images, shape=[32, 32])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    made = {str(i): encoded(photograph(("china", "flower")[i % 2], (60 + i, 70 - i))) for i in range(12)}
    return files(tmp_path_factory.mktemp("images"), **made)


def images(source: LabeledFiles, kind: type[TrainImages]) -> torch.Tensor:
    with make_loader("dali", source, kind(image_size=32, seed=0), STREAM) as loader:
        return torch.cat([batch["images"].clone() for batch in loader])


@pytest.mark.parametrize(
    "kind", [Flipped, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Rand, Trivial, Auto))]
)
def test_some_samples_are_augmented_and_none_is_another(source: LabeledFiles, kind: type[TrainImages]) -> None:
    plain, augmented = images(source, TrainImages), images(source, kind)
    assert (augmented.shape, augmented.dtype) == (plain.shape, torch.uint8)
    changed = (augmented != plain).flatten(1).any(1)
    assert changed.any()
    if kind is Flipped:
        assert not changed.all()
        assert torch.equal(augmented[changed].flip(2), plain[changed])


def test_an_if_without_conditionals_is_an_error_with_a_remedy(source: LabeledFiles) -> None:
    with pytest.raises(TypeError) as error:
        images(source, Unasked)
    assert "conditionals = True" in error.value.__notes__[0]


class Earlier(TrainImages):
    def inputs(self, source: Any, ids: Any, epochs: Any) -> Any:  # type: ignore[override]
        return source.labels[ids]


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_a_pipeline_in_its_earlier_form_is_refused(tmp_path: Path, loader: LoaderName) -> None:
    source = files(tmp_path, one=encoded(photograph()))
    with pytest.raises(UsageError, match=mentioning("Earlier inputs(source, samples) docs/own-data.md")):
        make_loader(loader, source, Earlier(image_size=8, seed=0), STREAM)
