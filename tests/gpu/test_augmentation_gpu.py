"""Augmentation by kernels on a GPU: what torch does on the host, fast, and in the loader."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from raydali.data.augment.augmentation import Augmentation
from raydali.data.augment.operations import OPERATIONS, WIDTH
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages

pytestmark = pytest.mark.gpu

POLICIES = ["trivial", "rand:9,2", "auto", "three+jitter:0.3", "augmix", "jitter:0.4,0.2+grey:0.2+blur:0.5", "shift:4"]
GOAL_SECONDS = 0.4e-3
"""TrivialAugmentWide and erasing of 256 images of 224 x 224."""


def smooth(count: int, side: int) -> torch.Tensor:
    noise = torch.rand(count, 3, 13, 13, generator=torch.Generator().manual_seed(0))
    images = functional.interpolate(noise, (side, side), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    return images.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("filter", ["bilinear", "nearest"])
@pytest.mark.parametrize("policy", [*POLICIES, "rand-m7-mstd0.5-inc1", "none"])
@pytest.mark.parametrize("side", [28, 161])
def test_pixels_are_those_of_the_host(policy: str, filter: str, side: int) -> None:
    augmentation = Augmentation(policy, 0.3, warp_filter="nearest" if filter == "nearest" else "bilinear")
    images, ids = smooth(96, side), np.arange(96)
    plans = torch.from_numpy(augmentation.draw(0, ids * 0, ids, side))
    ours = augmentation.apply(images.cuda(), plans.cuda())
    assert ours.is_contiguous(memory_format=torch.channels_last)
    difference = (ours.cpu().int() - augmentation.apply(images, plans).int()).abs()
    assert not torch.equal(ours.cpu(), images)
    assert (difference <= 1).float().mean() > 0.99, "chains of operations may enlarge a difference of 1"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("Identity", "BlurX", "BlurY")])
def test_one_operation_is_within_one(name: str) -> None:
    magnitudes = {"Posterize": [0, 2, 5], "Rotate": [-100, 3, 45], "SolarizeAdd": [0, 20, 110], "Hue": [-0.5, 0.1, 0.4]}
    magnitudes |= {"TranslateX": [-9, 1, 32], "TranslateY": [-9, 1, 32]}
    rows = OPERATIONS[name](np.array(magnitudes.get(name, [-0.3, 0.2, 0.9]), np.float64), 97)
    plans = torch.from_numpy(np.stack([rows, np.zeros_like(rows)], 1))
    assert plans.shape == (3, 2, WIDTH)
    augmentation, images = Augmentation("trivial"), smooth(3, 97)
    ours = augmentation.apply(images.cuda(), plans.cuda()).cpu()
    theirs = augmentation.apply(images, plans)
    assert (ours.int() - theirs.int()).abs().max() <= 1
    if name not in ("Rotate", "ShearX", "ShearY", "Sharpness", "Hue"):
        assert torch.equal(ours, theirs)


def seconds_of(augmentation: Augmentation, count: int = 256, side: int = 224) -> float:
    images, ids = smooth(count, side).cuda(), np.arange(count)
    plans = torch.from_numpy(augmentation.draw(0, ids * 0, ids, side)).cuda()
    times = []
    for _ in range(60):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host is ahead, as in training
        begin.record()
        augmentation.apply(images, plans)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(np.median(times))


def test_kernels_are_fast() -> None:
    for policy in ["trivial", *POLICIES[1:]]:
        print(f"{policy} + erasing: {seconds_of(Augmentation(policy, 0.25)) * 1e3:.3f} ms for 256 images of 224 x 224")
    assert seconds_of(Augmentation("trivial", 0.25)) <= GOAL_SECONDS


def test_the_loader_augments_on_the_gpu() -> None:
    source = LabeledFiles.scan(str(Path(digits_folder(), "val")))
    stream = Stream(samples=len(source), epochs=1, batch_size=64, global_batch_size=64, seed=0)
    batches = {}
    for policy in ("none", "trivial"):
        pipeline = TrainImages(image_size=32, seed=1, augmentation=Augmentation(policy))
        with make_loader("dali", source, pipeline, stream, device="cuda:0", threads=2) as loader:
            resident = loader.resident_batch(64)
            assert resident.keys() == {"images", "labels"}
            batches[policy] = [(batch["images"].clone(), batch.ids) for batch in loader]
    for (plain, ids), (augmented, _) in zip(batches["none"], batches["trivial"], strict=True):
        plans = torch.from_numpy(Augmentation("trivial").draw(1, ids * 0, ids, 32))
        expected = Augmentation("trivial").apply(plain.cpu(), plans)
        assert ((augmented.cpu().int() - expected.int()).abs() <= 1).float().mean() > 0.995
