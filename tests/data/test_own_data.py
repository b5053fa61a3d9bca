"""The example of docs/own-data.md, as it stands there."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.loader import LoaderName, make_loader
from tests.data.pictures import photograph

DOCUMENT = Path(__file__).parents[2] / "docs/own-data.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the document's Python leaves behind, run on photographs whose masks say where they are bright."""
    folder = tmp_path_factory.mktemp("own-data")
    for i in range(9):
        image = photograph(("china", "flower")[i % 2], (100 + i, 90 - i))
        for kind, one in (("images", image), ("masks", image.convert("L").point(lambda value: value // 128))):
            (folder / "photographs" / kind).mkdir(parents=True, exist_ok=True)
            one.save(folder / "photographs" / kind / f"{i}.png")
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    left: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, str(DOCUMENT), "exec"), left)
        left["pairs"] = left["pairs"].at(str(folder / "photographs"))
    finally:
        os.chdir(here)
    return left


def test_it_runs_as_it_stands(example: dict[str, Any]) -> None:
    images, masks = example["images"], example["masks"]
    assert (images.shape, images.dtype) == ((4, 3, 64, 64), torch.uint8)
    assert (masks.shape, masks.dtype) == ((4, 64, 64), torch.int64)


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_masks_follow_their_images(name: LoaderName, example: dict[str, Any]) -> None:
    with make_loader(name, example["pairs"], example["Masked"](side=64, seed=0), example["stream"]) as loader:
        batches = [*loader]
    assert sorted([id for batch in batches for id in batch.ids.tolist()][:9]) == [*range(9)]
    for batch in batches:
        for image, mask in zip(batch["images"], batch["masks"], strict=True):
            bright = Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L").point(lambda value: value // 128)
            assert torch.equal(F.pil_to_tensor(bright), mask)
