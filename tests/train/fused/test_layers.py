"""The stem's convolution in its form for tensor cores."""

import pytest
import torch
from torch.nn import functional

from raydali.train.fused import layers, operators
from tests.support.batch_norms import random_bits

pytestmark = pytest.mark.skipif(not operators.INTERPRETED, reason="tensor cores compute: see test_fused_gpu.py")


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what became squares."""
    shapes: list[torch.Size] = []
    whole = layers._squares

    def counted(images: torch.Tensor, *sides: int) -> torch.Tensor:
        shapes.append(images.shape)
        return whole(images, *sides)

    monkeypatch.setattr(layers, "_squares", counted)
    return shapes


@pytest.mark.parametrize("shape", [(2, 3, 18, 16), (1, 3, 17, 19), (3, 3, 1, 2)])
def test_it_is_exact(shape: tuple[int, ...], squares: list[torch.Size]) -> None:
    """Sums of few products of 0, 1 and -1 are exact in bf16."""
    images, weight = random_bits(shape, 0), random_bits((8, 3, 7, 7), 1).requires_grad_()
    output = layers.stem_convolution(images, weight, None)
    grad = random_bits(output.shape, 2)
    output.backward(grad)
    exact = weight.detach().double().requires_grad_()
    expected = functional.conv2d(images.double(), exact, None, *layers.STEM_SETTINGS)
    expected.backward(grad.double())
    assert weight.grad is not None and exact.grad is not None
    assert torch.equal(output.double(), expected) and torch.equal(weight.grad.double(), exact.grad)
    assert squares == [shape, weight.shape]
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_other_convolutions_are_pytorchs(squares: list[torch.Size]) -> None:
    images, weight, bias = random_bits((1, 3, 8, 8), 0), random_bits((4, 3, 7, 7), 1), random_bits((4,), 2)
    convolution = torch.ops.raydali.stem_convolution
    assert torch.equal(
        convolution(images, weight, bias), functional.conv2d(images, weight, bias, *layers.STEM_SETTINGS)
    )
    assert len(squares) == 2
    convolution(images.float(), weight.float(), None)
    convolution(images.clone().requires_grad_(), weight, None)
    convolution(images, weight[..., :5], None)
    convolution(images[:, :2], weight[:, :2], None)
    assert len(squares) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(images.float(), weight.float(), None).dtype == torch.bfloat16
    assert len(squares) == 4
