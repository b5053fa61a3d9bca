"""The counted operations against counts by hand, and the peaks of GPUs by their names."""

import logging

import pytest
import torch
import torchvision
from torch import nn

from raydali.measure.flops import flops_per_image, peak_flops, peak_of
from raydali.training.models.small_images import digits_network
from tests.support.messages import mentions


def counted(model: nn.Module, size: int) -> float | None:
    inputs = torch.rand(4, 3, size, size), torch.randint(0, 10, (4,))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return flops_per_image(lambda images, labels: nn.functional.cross_entropy(model(images), labels), trained, inputs)


def test_the_digits_network() -> None:
    model = digits_network(10)
    first = 16 * 16 * 32 * 3 * 9  # multiplications of the first convolution, whose images need no gradient
    others = 8 * 8 * 64 * 32 * 9 + 4 * 4 * 128 * 64 * 9 + 128 * 10
    assert counted(model, 32) == 2 * (2 * first + 3 * others)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter in model[:-1].parameters():
        parameter.requires_grad = False
    assert counted(model, 32) == 2 * (first + others + 128 * 10)


@pytest.mark.parametrize(("name", "multiplications"), [("resnet50", 4.09e9), ("mobilenet_v3_large", 0.217e9)])
def test_published_models(name: str, multiplications: float) -> None:
    # For an image of 224 pixels, forward, and twice as many backward.
    assert counted(torchvision.models.get_model(name), 224) == pytest.approx(multiplications * 2 * 3, rel=0.02)


def test_transposed_convolutions_in_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 2, 2, groups=4), nn.AvgPool2d(8), nn.Flatten())
    assert counted(model, 4) == 2 * 4 * 4 * (2 * 3 * 8 + 3 * 8 * 3 * 4)


def test_a_loss_that_cannot_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("four images are needed")

    with caplog.at_level(logging.WARNING):
        assert flops_per_image(broken, [], [torch.rand(4, 3)]) is None
    assert mentions(caplog.text, "FLOPs ValueError four images")


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494e12),
        ("NVIDIA H200 NVL", 835e12, 417e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("Tesla T4", 65e12, 8e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA A1000", None, None),
    ],
)
def test_the_peak_of_a_gpu(name: str, half: float | None, single: float | None) -> None:
    assert peak_of(name, torch.bfloat16) == peak_of(name, torch.float16) == half
    assert peak_of(name, torch.float32) == single


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None
