"""Operations on the CPU and by Triton's kernels against torchvision's, on the same images and magnitudes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from raydali.data.augment import cpu, kernels
from raydali.data.augment.augmentation import Augmentation
from raydali.data.augment.operations import OPERATIONS, TABLES, WIDTH, Kind, rows
from tests.support.quick import first_quick

SIDE = 23
BLACK, GREEN = (0, 0, 0), (10, 200, 30)
WARPS = ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"]
NAMES = [*v2.TrivialAugmentWide._AUGMENTATION_SPACE, "Invert"]
Augmented = Callable[..., torch.Tensor]
Judged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

on_both = pytest.mark.parametrize("augmented", [cpu.augmented, kernels.augmented], ids=["torch", "triton"])


def smooth(count: int, side: int = SIDE, seed: int = 0) -> torch.Tensor:
    """Images whose neighbours are alike, as in photographs: one value over all, one of few values among them."""
    noise = torch.rand(count, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
    images = functional.interpolate(noise, (side, side), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    images[0], images[1] = 77, images[1] // 100 * 100
    return images.contiguous(memory_format=torch.channels_last)


def plans(of_images: Sequence[Any]) -> torch.Tensor:
    """Plans of one operation each, which erase nothing."""
    return torch.from_numpy(np.stack([np.stack([row, np.zeros(WIDTH, np.float32)]) for row in of_images]))


def judged(augmented: Augmented, name: str, *, nearest: bool = False, fill: tuple[int, ...] = BLACK) -> Judged:
    """Images, what an operation makes of each with a magnitude of its own, and what torchvision makes of it."""
    levels, signed = v2.TrivialAugmentWide._AUGMENTATION_SPACE.get(name, (lambda *_: None, False))
    of_bins = levels(31, SIDE, SIDE)
    magnitudes = [0.0] * 3 if of_bins is None else [float(each) for each in of_bins[[0, 3, 11, 22, 30]]]
    magnitudes += [-each for each in magnitudes[1:]] if signed else []
    if name.startswith("Translate"):
        magnitudes = [float(int(each)) for each in magnitudes]
    images = smooth(len(magnitudes))
    planned = plans([OPERATIONS[name](np.array([each]), SIDE)[0] for each in magnitudes])
    ours = augmented(images, planned, slots=1, chains=1, fill=fill, colour=GREEN, nearest=nearest)
    mode = InterpolationMode.NEAREST if nearest else InterpolationMode.BILINEAR
    judge: Any = v2.TrivialAugmentWide(interpolation=mode)
    # Where it fills with a colour, torchvision weights it with the square of the share that lies outside.
    outside = torch.tensor(fill, dtype=torch.float32)[:, None, None] if any(fill) else None
    theirs = []
    for image, magnitude in zip(images, magnitudes, strict=True):
        shifted = image if outside is None else image - outside
        result = judge._apply_image_or_video_transform(shifted, name, magnitude, mode, judge._fill)
        theirs.append(result if outside is None else (result + outside).round().to(torch.uint8))
    return images, ours, torch.stack(theirs)


@on_both
@first_quick("name", [name for name in NAMES if OPERATIONS[name](np.zeros(1), SIDE)[0, 0] in (0, *TABLES)])
def test_tables_are_exact(augmented: Augmented, name: str) -> None:
    images, ours, theirs = judged(augmented, name)
    assert name == "Identity" or not torch.equal(ours, images)
    assert torch.equal(ours, theirs)


@on_both
@first_quick(
    ("name", "fill"),
    [(name, BLACK) for name in ("Color", "Sharpness", *WARPS)] + [(name, GREEN) for name in ("Rotate", "ShearX")],
)
def test_filters_and_bilinear_warps_are_within_one(augmented: Augmented, name: str, fill: tuple[int, ...]) -> None:
    images, ours, theirs = judged(augmented, name, fill=fill)
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert not torch.equal(ours, images)


@on_both
@pytest.mark.parametrize("name", WARPS)
def test_nearest_pixels_are_the_same_or_a_neighbours(augmented: Augmented, name: str) -> None:
    _, ours, theirs = judged(augmented, name, nearest=True)
    same = (ours == theirs).all(1)
    assert same.float().mean() >= 0.999
    around = functional.unfold(functional.pad(theirs.float(), [1, 1, 1, 1], "replicate"), 3)
    around = around.view(len(ours), 3, 9, SIDE, SIDE)
    assert (same | (around == ours.float()[:, :, None]).all(1).any(1)).all()


@on_both
def test_hue_grey_and_blur_are_within_one_of_torchvisions(augmented: Augmented) -> None:
    images = smooth(8)
    turns, sigmas = [-0.5, -0.21, 0.1, 0.5], [0.1, 0.7, 2.0]
    planned = plans([*rows(Kind.HUE, turns), *OPERATIONS["Grey"](np.zeros(1), SIDE), *rows(Kind.BLUR_ROWS, sigmas)])
    options: dict[str, Any] = {"slots": 1, "chains": 1, "fill": BLACK, "colour": GREEN, "nearest": False}
    ours = augmented(images, planned, **options)
    ours[5:] = augmented(ours[5:], plans([*rows(Kind.BLUR_COLUMNS, sigmas)]), **options)
    expected = torch.stack(
        [
            *(F.adjust_hue(image, turn) for image, turn in zip(images, turns, strict=False)),
            F.rgb_to_grayscale(images[4], 3),
            *(
                F.gaussian_blur(image, [13, 13], [sigma, sigma])
                for image, sigma in zip(images[5:], sigmas, strict=True)
            ),
        ]
    )
    assert (ours.int() - expected.int()).abs().max() <= 1
    assert torch.equal(ours[4], expected[4])


@first_quick(
    ("policy", "side"),
    [
        ("trivial", 40),
        ("rand:9,2", 16),
        ("auto", 24),
        ("three", 40),
        ("augmix", 24),
        ("jitter:.4,.2+shift:3", 17),
        ("none", 9),
    ],
)
def test_kernels_do_what_torch_does_with_whole_policies(policy: str, side: int) -> None:
    augmentation = Augmentation(policy, erase=0.5)
    images, ids = smooth(6, side), np.arange(6)
    planned = torch.from_numpy(augmentation.draw(1, np.zeros_like(ids), ids, side))
    of = augmentation.parsed
    options: dict[str, Any] = {"slots": of.slots, "chains": of.chains, "colour": GREEN, "nearest": False}
    by_torch = cpu.augmented(images, planned, fill=GREEN, **options)
    difference = (kernels.augmented(images, planned, fill=GREEN, **options).int() - by_torch.int()).abs()
    assert not torch.equal(by_torch, images)
    assert (difference <= 1).float().mean() > 0.995  # a table may enlarge a difference of 1
    assert torch.equal(images, smooth(6, side)), "the images themselves are changed"


@on_both
def test_erased_rectangles_have_the_mean_colour(augmented: Augmented) -> None:
    augmentation = Augmentation(erase=1.0, colour=GREEN)
    images, ids = smooth(5), np.arange(5)
    planned = torch.from_numpy(augmentation.draw(0, np.zeros_like(ids), ids, SIDE))
    ours = augmented(images, planned, slots=0, chains=1, fill=BLACK, colour=GREEN, nearest=False)
    for image, result, row in zip(images, ours, planned[:, -1].int().tolist(), strict=True):
        top, left, height, width, *_ = row
        assert height * width > 0.01 * SIDE * SIDE
        expected = F.erase(image, top, left, height, width, torch.tensor(GREEN, dtype=torch.uint8)[:, None, None])
        assert torch.equal(result, expected)


def test_a_table_after_a_warp_also_maps_its_corners() -> None:
    images = smooth(2)
    warp, invert = OPERATIONS["TranslateX"](np.array([9.0]), SIDE)[0], OPERATIONS["Invert"](np.zeros(1), SIDE)[0]
    planned = torch.from_numpy(np.stack([[warp, invert, 0 * warp]] * 2))
    for augmented in (cpu.augmented, kernels.augmented):
        ours = augmented(images, planned, slots=2, chains=1, fill=BLACK, colour=GREEN, nearest=False)
        assert (ours[..., :9] == 255).all()
        assert torch.equal(ours[..., 9:], 255 - images[..., :-9])
