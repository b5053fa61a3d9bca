"""Pairs on a GPU: the windows and flips of the CPU, and its pixels but for rounding."""

from pathlib import Path

import pytest
import torch

from raydali.data.index.image_pairs import ImagePairs
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.restoration import TrainPairs, ValidationPairs
from tests.support.pictures import encoded, photograph

pytestmark = pytest.mark.gpu

CROP = (96, 128)
STREAM = Stream(samples=16, epochs=3, batch_size=8, global_batch_size=8, seed=1)
PASS = OrderedPass(samples=16, batch_size=6)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for id in range(16):
        image = photograph(("china", "flower")[id % 2], (150 + 9 * id, 120 + 7 * id))
        for folder, kind in (("img", "JPEG"), ("gt", ("JPEG", "PNG")[id % 2])):
            (tmp_path / folder).mkdir(exist_ok=True)
            # nvJPEG brings colours of half the size to full size in another way: test_classification_gpu.py.
            options = {"subsampling": 0} if kind == "JPEG" else {}
            (tmp_path / folder / f"{id:02}.{kind.lower()}").write_bytes(encoded(image, kind, **options))
    return tmp_path


@pytest.mark.parametrize("training", [True, False])
def test_windows_and_flips_are_the_cpus(root: Path, training: bool) -> None:
    source = ImagePairs.scan(str(root))
    pipeline = TrainPairs(crop_size=CROP, seed=3) if training else ValidationPairs(crop_size=CROP)
    order = STREAM if training else PASS
    with (
        make_loader("dali", source, pipeline, order) as cpu,
        make_loader("dali", source, pipeline, order, device="cuda", threads=4) as gpu,
    ):
        for batch, expected in zip(gpu, cpu, strict=True):
            for name in ("inputs", "targets"):
                images = batch[name]
                assert images.device.type == "cuda" and images.dtype == torch.uint8
                assert images.shape == expected[name].shape == (len(batch.ids), 3, *CROP)
                assert images.is_contiguous(memory_format=torch.channels_last)
                difference = (images.cpu().float() - expected[name].float()).abs()
                assert difference.mean((1, 2, 3)).max() < 2
