"""Fused BatchNorm as operators of torch, which torch.compile and CUDA graphs take as they are.

`raydali::batch_norm` decomposes while a model is traced, when shapes and strides are known: into the three operators
below, or into PyTorch's own functions for what these do not take. Statistics and normalisation are two operators,
because one that changes its inputs, as running statistics are, cannot have a gradient.
"""

from typing import Any

import torch
import triton
from torch.nn import functional

from raydali.train.fused import kernels, launches, pooling, pooling_kernels

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets its kernels on the host, as in tests."""

Tensor = torch.Tensor


def takes(y: Tensor, residual: Tensor | None, weight: Tensor | None, running_mean: Tensor | None) -> bool:
    """Return whether the kernels can compute this; only devices, types, shapes and strides matter."""
    return (
        (y.device.type == "cuda" or INTERPRETED)
        and y.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and y.dim() == 4
        and y.numel() > y.shape[1]  # PyTorch refuses one value per channel
        and y.is_contiguous(memory_format=torch.channels_last)
        and all(each is not None and each.dtype == torch.float32 for each in (weight, running_mean))
        and (residual is None or _adds(y, residual))
    )


def _adds(y: Tensor, residual: Tensor) -> bool:
    same = y.shape == residual.shape and y.dtype == residual.dtype
    return same and y.shape[1] % kernels.SIGNS == 0 and residual.is_contiguous(memory_format=torch.channels_last)


def batch_norm(
    y: Tensor,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    pool: bool = False,
) -> Tensor:
    """Return BatchNorm of y in training, plus the residual if any, through ReLU and max-pooling if so.

    Args:
        y: images (N, C, H, W).
        residual: images like y.
        running_mean: (C); it is updated.
        running_var: (C); it is updated.
        weight: (C).
        bias: (C).
        momentum: share of this batch in the running statistics.
        eps: is added to the variance.
        relu: whether to apply ReLU, as after every addition.
        pool: whether max-pooling follows; then there is ReLU, and no residual.

    Raises:
        ValueError: y has one value per channel.
    """
    if takes(y, residual, weight, running_mean):
        mean, rstd = statistics(y.detach(), running_mean, running_var, momentum, eps)
        of_channels = mean, rstd, weight, bias
        output: Tensor = (normalize_and_pool(y, *of_channels) if pool else normalize(y, residual, *of_channels, relu))[
            0
        ]
        return output
    output = functional.batch_norm(y, running_mean, running_var, weight, bias, True, momentum, eps)
    output = output if residual is None else output + residual
    output = functional.relu(output) if relu else output
    return functional.max_pool2d(output, *pooling_kernels.WINDOWS) if pool else output


@torch.library.custom_op("raydali::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def statistics(
    y: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of channels, as launches.statistics does."""
    return launches.statistics(y, running_mean, running_var, momentum, eps)


@statistics.register_fake
def _(y: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_mean)


@torch.library.custom_op("raydali::batch_norm_normalize", mutates_args=())
def normalize(
    y: Tensor, residual: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the signs, as launches.normalize does."""
    return launches.normalize(y, residual, mean, rstd, weight, bias, relu)


@normalize.register_fake
def _(
    y: Tensor, residual: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), launches.empty_signs(y, residual)


@torch.library.custom_op("raydali::batch_norm_gradients", mutates_args=())
def gradients(
    grad: Tensor,
    other: Tensor | None,
    y: Tensor,
    signs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, the residual, weight and bias, as launches.gradients does."""
    return launches.gradients(grad, other, y, signs, mean, rstd, weight, bias, relu)


@gradients.register_fake
def _(
    grad: Tensor,
    other: Tensor | None,
    y: Tensor,
    signs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(y), launches.empty_masked(y, other, signs), torch.empty_like(mean), torch.empty_like(mean)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    y, residual, *statistics_and_weights, ctx.relu = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(y, output[1], *statistics_and_weights)


def _backward(ctx: Any, grad: Tensor, _of_signs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    """Return the gradients of the inputs; that of y includes what it gets by its statistics."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    of_y, of_residual, of_weight, of_bias = gradients(grad, None, *ctx.saved_tensors, ctx.relu)
    return of_y, of_residual if ctx.has_residual else None, None, None, of_weight, of_bias, None


normalize.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("raydali::batch_norm_pool", mutates_args=())
def normalize_and_pool(
    y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the winners and their positions, as pooling.normalize_and_pool does."""
    return pooling.normalize_and_pool(y, mean, rstd, weight, bias)


@normalize_and_pool.register_fake
def _(y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return pooling.empty_windows(y)


@torch.library.custom_op("raydali::batch_norm_pool_gradients", mutates_args=())
def gradients_of_pool(
    grad: Tensor,
    other: Tensor | None,
    y: Tensor,
    winners: Tensor,
    positions: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, weight and bias, as pooling.gradients does."""
    return pooling.gradients(grad, other, y, winners, positions, mean, rstd, weight, bias)


@gradients_of_pool.register_fake
def _(
    grad: Tensor,
    other: Tensor | None,
    y: Tensor,
    winners: Tensor,
    positions: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(mean), torch.empty_like(mean)


def _keep_windows(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    y, *statistics_and_weights = inputs
    ctx.save_for_backward(y, *output[1:], *statistics_and_weights)


def _backward_of_pool(ctx: Any, grad: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    grad = grad.contiguous(memory_format=torch.channels_last)
    of_y, of_weight, of_bias = gradients_of_pool(grad, None, *ctx.saved_tensors)
    return of_y, None, None, of_weight, of_bias


normalize_and_pool.register_autograd(_backward_of_pool, setup_context=_keep_windows)

_LIBRARY = torch.library.Library("raydali", "FRAGMENT")
_LIBRARY.define("batch_norm" + torch.library.infer_schema(batch_norm, mutates_args=("running_mean", "running_var")))
_LIBRARY.impl("batch_norm", batch_norm, "CompositeImplicitAutograd")
