"""The example of docs/own-data.md, as it stands there."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.loading.quarantine import Quarantine
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.masks import TrainMasks, ValidationMasks
from raydali.train.evaluation.classification import evaluate_masks
from raydali.train.evaluation.validation import ValidationPass
from raydali.train.step import Precision
from raydali.train.worker import Worker
from tests.support.pictures import encoded, files, oriented, photograph

DOCUMENT = Path(__file__).parents[3] / "docs/own-data.md"


def brightness(value: int) -> int:
    """The class of a grey value, 0..3."""
    return value // 64


class Brightness(torch.nn.Module):
    """Scores (N, 4, H, W) that say how bright the pixels of images (N, 3, H, W) are."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        grey = F.rgb_to_grayscale(images).squeeze(1)
        return torch.nn.functional.one_hot((grey // 64).long(), 4).movedim(-1, 1).float()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the document's Python leaves behind, run on photographs whose masks say how bright they are.

    Some masks have a palette, VOC's, and some photographs lie on their side, which their EXIF says.
    """
    folder = tmp_path_factory.mktemp("own-data")
    for kind in ("images", "masks"):
        (folder / "photographs" / kind).mkdir(parents=True)
    for i in range(9):
        image = photograph(("china", "flower")[i % 2], (100 + i, 90 - i))
        mask = image.convert("L").point(brightness)
        if i % 3:
            mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0])
            assert mask.mode == "P"
        exif: Any = {}
        if i % 2:
            image, exif = image.transpose(Image.Transpose.ROTATE_90), {"exif": oriented(6)}
        image.save(folder / f"photographs/images/{i}.png", **exif)
        mask.save(folder / f"photographs/masks/{i}.png")
    # Each line at its place, since DALI reads the source of a graph with conditionals.
    parts = re.split(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    code = "\n".join(part if i % 2 else "\n" * part.count("\n") for i, part in enumerate(parts))
    left: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, str(DOCUMENT), "exec"), left)
        left["pairs"] = left["pairs"].relocate(str(folder / "photographs"))
    finally:
        os.chdir(here)
    return left


def test_it_runs_as_it_stands(example: dict[str, Any]) -> None:
    images, masks = example["images"], example["masks"]
    assert (images.shape, images.dtype) == ((4, 3, 64, 64), torch.uint8)
    assert (masks.shape, masks.dtype) == ((4, 64, 64), torch.int64)


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_masks_follow_their_images(name: LoaderName, example: dict[str, Any]) -> None:
    with make_loader(name, example["pairs"], TrainMasks(side=64, seed=0), example["stream"]) as loader:
        batches = [*loader]
    assert sorted([id for batch in batches for id in batch.ids.tolist()][:9]) == [*range(9)]
    for batch in batches:
        for image, mask in zip(batch["images"], batch["masks"], strict=True):
            bright = Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L").point(brightness)
            assert torch.equal(F.pil_to_tensor(bright), mask)
            assert set(mask.unique().tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_the_validation_takes_the_centre_of_each_image_once(name: LoaderName, example: dict[str, Any]) -> None:
    worker = Worker.join(torch.device("cpu"), cpus=1, node="")
    precision = Precision("fp32", worker.device)
    val = OrderedPass(samples=len(example["pairs"]), batch_size=4)
    with make_loader(name, example["pairs"], ValidationMasks(side=64), val) as loader:
        assert loader.resident_batch(2)["masks"].max() < 4  # or the loss of a warm-up step would refuse it
        metrics = evaluate_masks(Brightness(), ValidationPass(loader, example["pairs"], worker, precision), classes=4)
    assert metrics["images"] == 9 and 0.95 < metrics["iou"] <= 1.0


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_masks_that_do_not_fit_are_replaced(name: LoaderName, example: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(example["pairs"].inputs.root, tmp_path, dirs_exist_ok=True)
    photograph("china", (50, 60)).convert("L").save(tmp_path / "masks/3.png")
    photograph("china", (100, 90)).save(tmp_path / "masks/4.png")
    pairs, stream = example["pairs"].relocate(str(tmp_path)), example["stream"]
    known = Quarantine(stream.samples, seed=0)
    with make_loader(name, pairs, TrainMasks(side=64, seed=0), stream, quarantine=lambda _: known) as loader:
        assert sum(batch.micro_batch.replaced for batch in loader) >= 2
    assert sorted(known.known) == [3, 4]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_inputs_draws_is_the_same_on_any_rank(
    example: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(tmp_path, **{f"{i}": encoded(photograph(size=(60, 50))) for i in range(48)})
    stream = Stream(samples=48, epochs=1, batch_size=6, global_batch_size=12, seed=0)
    pipeline = example["RandAugmented"](image_size=32, seed=0)
    monochrome = pipeline.inputs(source, np.arange(48), np.zeros(48, np.int64))[-1]

    def grey() -> list[int]:
        found = []
        for rank in range(2):
            options: dict[str, Any] = {"rank": rank, "world_size": 2, "device": device}
            with make_loader("dali", source, pipeline, stream, **options) as loader:
                for batch in loader:
                    assert batch["images"].dtype == torch.uint8 and batch["images"].shape == (6, 3, 32, 32)
                    spread = batch["images"].float().std(1).amax((1, 2))
                    found += batch.ids[(spread < 5).cpu().numpy()].tolist()
        return sorted(found)

    assert grey()  # some of DALI's operations tint what is grey, and some take the colours of what is not
    monkeypatch.setattr("nvidia.dali.auto_aug.rand_augment.rand_augment", _unchanged)
    assert grey() == np.flatnonzero(monochrome).tolist() and 0 < monochrome.sum() < 48


def _unchanged(images: Any, **_: int) -> Any:
    return images
