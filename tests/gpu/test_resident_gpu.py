"""The resident loader on a GPU: the CPU's pixels, and no waiting for the GPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raydali.data.augment.augmentation import Augmentation
from raydali.data.loading.make import make_loader
from raydali.data.sources.idx import IdxImages
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from tests.support.idx_files import pictures, write_idx

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
GPU = torch.device("cuda", 0)
STREAM = Stream(samples=40, epochs=3, batch_size=8, global_batch_size=8, seed=1)
WHOLE = TrainImages(image_size=28, seed=3, random_area=(1, 1), augmentation=Augmentation("shift:4", erase=0.3))


@pytest.fixture
def source(tmp_path: Path) -> IdxImages:
    return IdxImages.scan(str(write_idx(tmp_path, "train", pictures(40, 28, 28), np.arange(40, dtype=np.uint8))))


@pytest.mark.parametrize("pipeline", [WHOLE, replace(WHOLE, random_area=(0.1, 1), augmentation=Augmentation())])
def test_pixels_are_those_on_the_cpu_and_nothing_waits(source: IdxImages, pipeline: TrainImages) -> None:
    with (
        make_loader("resident", source, pipeline, STREAM, device=GPU, threads=2) as ours,
        make_loader("resident", source, pipeline, STREAM, threads=2) as theirs,
    ):
        batches = iter(ours)
        found = [next(batches)]  # compiles the kernels of the augmentation
        torch.cuda.set_sync_debug_mode("error")
        try:
            found += batches
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for batch, expected in zip(found, theirs, strict=True):
            assert batch["images"].is_contiguous(memory_format=torch.channels_last)
            difference = (batch["images"].cpu().int() - expected["images"].int()).abs()
            # Both roundings of a resized pixel may meet a tie, which the order of additions decides.
            assert difference.max() <= (0 if pipeline is WHOLE else 2)
            assert (difference > 1).float().mean() < 0.001
            assert torch.equal(batch["labels"].cpu(), expected["labels"])
