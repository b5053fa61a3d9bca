"""A layer of BatchNorm, addition and ReLU: its inputs, and its results by fused operators or by PyTorch's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

import raydali.training.fused.layers  # noqa: F401  # torch.ops.raydali
from raydali.training.fused import kernels

SETTINGS = 0.1, 1e-5
"""Momentum and eps."""
Tensors = dict[str, torch.Tensor]


def random_images(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normally distributed images, channels-last."""
    images = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return images.contiguous(memory_format=torch.channels_last)


def random_bits(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return zeros, ones and minus ones in bf16."""
    bits = torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).bfloat16()
    return bits.contiguous(memory_format=torch.channels_last) if bits.dim() == 4 else bits


def tensors(y: torch.Tensor, *, residual: bool) -> Tensors:
    """Return the inputs of a layer."""
    generator, channels = torch.Generator().manual_seed(1), y.shape[1]
    inputs = {
        "y": y,
        "weight": torch.rand(channels, generator=generator) + 0.5,
        "bias": torch.randn(channels, generator=generator),
        "running_mean": torch.randn(channels, generator=generator),
        "running_var": torch.rand(channels, generator=generator),
    }
    return inputs | ({"residual": random_images(y.shape, y.dtype, 2)} if residual else {})


def results(
    inputs: Tensors,
    grad: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    relu: bool = True,
    pool: bool = False,
    group: str = "",
) -> Tensors:
    """Return the output, the running statistics and the gradients; of PyTorch's functions in another dtype."""
    own = {name: tensor.to(dtype or tensor.dtype, copy=True) for name, tensor in inputs.items()}
    trained = {name: own[name].requires_grad_() for name in ("y", "weight", "bias", "residual") if name in own}
    y, statistics, weights = own["y"], (own["running_mean"], own["running_var"]), (own["weight"], own["bias"])
    if dtype is None:
        of_layer = *statistics, *weights, *SETTINGS, relu, pool, group
        output = torch.ops.raydali.batch_norm(y, own.get("residual"), *of_layer)
    else:
        output = functional.batch_norm(y, *statistics, *weights, True, *SETTINGS) + own.get("residual", 0)
        output = functional.relu(output) if relu else output
        output = functional.max_pool2d(output, 3, 2, 1) if pool else output
    output.backward(grad.to(output.dtype))
    gradients = {f"gradient of {name}": tensor.grad for name, tensor in trained.items() if tensor.grad is not None}
    return {"output": output.detach(), "mean": statistics[0], "variance": statistics[1]} | gradients


class _CountedKernel:
    def __init__(self, kernel: Any, seen: list[int]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, programs: object) -> Callable[..., None]:
        def launch(y: torch.Tensor, *others: object, **settings: object) -> None:
            self._seen.append(y.shape[1])
            self._kernel[programs](y, *others, **settings)

        return launch


def count_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each layer adds its number of channels when kernels compute its statistics."""
    seen: list[int] = []
    monkeypatch.setattr(kernels, "complete_moments", _CountedKernel(kernels.complete_moments, seen))
    return seen
