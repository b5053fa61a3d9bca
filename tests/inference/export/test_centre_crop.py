"""Resizing as arithmetic gives the pixels of validation."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.tasks.crops import resize_and_crop
from raydali.data.tasks.pipeline import Interpolation
from raydali.inference.export.centre_crop import CentreCrop
from tests.support.pictures import photograph

SIZES = [(64, 64), (65, 64), (63, 64), (97, 31), (300, 401), (480, 640), (1001, 333), (2, 3), (20, 300), (1, 5000)]
"""Height and width: larger and smaller than the crop, odd and even, much longer than wide, and a thin one."""


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_are_those_of_validation(height: int, width: int, interpolation: Interpolation) -> None:
    shorter, side = 64, 56
    image = photograph().convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    expected = resize_and_crop(np.array(image), shorter, side, interpolation)
    found = CentreCrop(shorter, side, interpolation)(F.pil_to_tensor(image)[None])
    assert found.shape == (1, 3, side, side) and found.dtype == torch.float32
    differences = np.abs(found[0].permute(1, 2, 0).numpy() - expected)
    assert (differences > 0).mean() < 0.01 and (differences > 1).mean() < 0.001 and differences.max() <= 2


def test_a_batch_is_cropped_as_its_images_are() -> None:
    images = torch.randint(0, 256, (3, 3, 50, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crop = CentreCrop(40, 32, "bicubic")
    assert torch.equal(crop(images), torch.cat([crop(image[None]) for image in images]))
    assert torch.equal(CentreCrop(50, 50, "bilinear")(images), images[..., 10:60].float()), "without resizing, exact"
