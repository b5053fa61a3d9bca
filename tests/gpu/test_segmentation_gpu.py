"""Segmentation on a GPU: the CPU's masks, its pixels but for rounding, and runs that learn the shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.index.masked_images import MaskedImages, train_and_val
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.segmentation import TrainImages, ValidationImages
from tests.support.cluster import finished_run
from tests.support.pictures import encoded, photograph

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
CANVAS = (128, 160)
STREAM = Stream(samples=16, epochs=3, batch_size=8, global_batch_size=8, seed=1)
PASS = OrderedPass(samples=16, batch_size=6)


@pytest.fixture
def source(tmp_path: Path) -> MaskedImages:
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for id in range(16):
            width, height = 100 + 3 * id, 70 + 3 * id
            image = photograph(("china", "flower")[id % 2], (width, height))
            for kind in ("images", "masks"):
                (tmp_path / split / kind).mkdir(exist_ok=True, parents=True)
            # nvJPEG brings colours of half the size to full size in another way: test_classification_gpu.py.
            (tmp_path / split / "images" / f"{id:02}.jpg").write_bytes(encoded(image, subsampling=0))
            mask = Image.fromarray(draw.integers(0, 5, (height, width), np.uint8))
            (tmp_path / split / "masks" / f"{id:02}.png").write_bytes(encoded(mask, "PNG"))
    train, _ = train_and_val(str(tmp_path), classes="5")
    return train


@pytest.mark.parametrize("training", [True, False])
def test_masks_are_the_cpus(source: MaskedImages, training: bool) -> None:
    pipeline = TrainImages(canvas=CANVAS, base_size=120, seed=3) if training else ValidationImages(canvas=CANVAS)
    order = STREAM if training else PASS
    with (
        make_loader("dali", source, pipeline, order) as cpu,
        make_loader("dali", source, pipeline, order, device="cuda", threads=4) as gpu,
    ):
        for batch, expected in zip(gpu, cpu, strict=True):
            images, masks = batch["images"], batch["masks"]
            assert images.device.type == masks.device.type == "cuda"
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(masks.cpu(), expected["masks"])
            assert (images.cpu().float() - expected["images"].float()).abs().mean((1, 2, 3)).max() < 2


def train(storage: Path, name: str, *options: str) -> list[dict[str, Any]]:
    run = finished_run(storage, name, "--gpu", "--workers", "1", *options, script="jobs/segmentation.py")
    return run.rows("epochs.jsonl")


def test_a_compiled_run_learns_the_shapes_and_another_one_starts_from_its_weights(tmp_path: Path) -> None:
    last = train(tmp_path, "first", "--precision", "bf16", "--compile")[-1]
    assert last["validation"]["iou"] > 0.6
    tuned = train(tmp_path, "tuned", "--epochs", "1", "--weights", str(tmp_path / "first"), "--learning-rate", "1e-4")
    assert tuned[-1]["validation"]["iou"] > last["validation"]["iou"] - 0.1
