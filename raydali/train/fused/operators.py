"""BatchNorm with addition and ReLU as operators of torch, which torch.compile and CUDA graphs take as they are.

Each launches kernels of kernels.py. Statistics and normalisation are two operators, because one that changes its
inputs, as running statistics are, cannot have a gradient.
"""

from typing import Any

import torch

from raydali.train.fused import kernels
from raydali.train.fused.grids import grid_of

Tensor = torch.Tensor


@torch.library.custom_op("raydali::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def statistics(
    y: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the mean and 1 / sqrt(variance + eps) of each channel (C, fp32), and update the running statistics.

    Args:
        y: images (N, C, H, W), channels-last, as all images here.
        running_mean: (C), fp32.
        running_var: (C), fp32: of the unbiased variance.
        momentum: share of this batch in the running statistics.
        eps: is added to the variance.
    """
    grid = grid_of(y)
    means, squares = grid.partial(y)
    mean, rstd = torch.empty_like(running_mean), torch.empty_like(running_mean)
    size = grid.rows, grid.columns
    kernels.moments[grid.reduction](y, means, squares, *size, **grid.tile)
    kernels.complete_moments[grid.completing](
        *(y, means, squares, mean, rstd, running_mean, running_var, *size, grid.reduction[1], momentum, eps),
        block_r=grid.tile["block_r"],
        **grid.completion,
    )
    return mean, rstd


@statistics.register_fake
def _(y: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_mean)


@torch.library.custom_op("raydali::batch_norm_normalize", mutates_args=())
def normalize(
    y: Tensor, residual: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the normalised images, or those plus the residual, through ReLU if so; and the signs of sums, packed.

    Args:
        y: images (N, C, H, W).
        residual: images like y; C is then a multiple of kernels.SIGNS, and relu is true.
        mean: that of each channel (C, fp32).
        rstd: 1 / sqrt(variance + eps) of each channel (C, fp32).
        weight: (C), fp32.
        bias: (C), fp32.
        relu: whether to apply ReLU.
    """
    grid, output = grid_of(y), torch.empty_like(y)
    size = grid.rows, grid.columns
    signs = empty_signs(y, residual)
    kernels.normalize[grid.sweep](
        *(y, y if residual is None else residual, output, signs, mean, rstd, weight, bias, *size, grid.height),
        adds=residual is not None,
        relu=relu,
        **grid.tile,
    )
    return output, signs


@normalize.register_fake
def _(
    y: Tensor, residual: Tensor | None, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), empty_signs(y, residual)


def empty_signs(y: Tensor, residual: Tensor | None) -> Tensor:
    """Return bytes for the signs of y plus the residual; none without a residual."""
    return y.new_empty(0 if residual is None else y.numel() // kernels.SIGNS, dtype=torch.uint8)


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
    """Return the gradients of y and of the residual (N, C, H, W; empty for none), and of weight and bias (C, fp32).

    Args:
        grad: a gradient of the output, like y.
        other: another gradient of the output, which is added.
        y: as in `normalize`, as are those below.
        signs: what `normalize` returned.
        mean: see there.
        rstd: see there.
        weight: see there.
        bias: see there.
        relu: see there.
    """
    grid, result = grid_of(y), torch.empty_like(y)
    mask = kernels.NOWHERE if not relu else kernels.PACKED if len(signs) else kernels.OUTPUT
    masked, of_weight, of_bias = weight_gradients(grad, other, y, signs, mean, rstd, weight, bias, mask)
    is_masked = len(masked) > 0
    kernels.input_gradient[grid.sweep](
        *(masked if is_masked else grad, y, result, mean, rstd, weight, bias, of_weight, of_bias),
        *(grid.rows, grid.columns, grid.height),
        masks=mask == kernels.OUTPUT and not is_masked,
        **grid.tile,
    )
    return result, masked, of_weight, of_bias


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
    return torch.empty_like(y), _empty_masked(y, other, signs), torch.empty_like(mean), torch.empty_like(mean)


def _empty_masked(y: Tensor, other: Tensor | None, signs: Tensor) -> Tensor:
    """Return room for the masked gradient, if it is written, because it would cost more to compute it twice."""
    return torch.empty_like(y) if other is not None or len(signs) else y.new_empty(0)


def weight_gradients(
    grad: Tensor,
    other: Tensor | None,
    y: Tensor,
    signs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masked gradient, empty if it is not written, and the gradients of weight and bias (C, fp32).

    The arguments are those of `gradients`, and the mask says where that of ReLU comes from, see kernels.
    """
    grid, masked = grid_of(y), _empty_masked(y, other, signs)
    sums, products = grid.partial(y)
    of_weight, of_bias = torch.empty_like(mean), torch.empty_like(mean)
    kernels.sums_of_gradients[grid.reduction](
        *(grad, grad if other is None else other, y, signs, masked, mean, rstd, weight, bias, sums, products),
        *(grid.rows, grid.columns),
        adds=other is not None,
        mask=mask,
        writes=len(masked) > 0,
        **grid.tile,
    )
    kernels.complete_sums[grid.completing](
        sums, products, rstd, of_weight, of_bias, grid.columns, grid.reduction[1], **grid.completion
    )
    return masked, of_weight, of_bias


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
