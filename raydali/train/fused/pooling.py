"""BatchNorm with ReLU and max-pooling as operators of torch, by the kernels of pooling_kernels.py."""

from typing import Any

import torch

from raydali.train.fused import grids, kernels, pooling_kernels
from raydali.train.fused.operators import empty_signs, weight_gradients

Tensor = torch.Tensor


def _empty_windows(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the output, the winners and their positions: images (N, C, (H + 1) // 2, (W + 1) // 2)."""
    shape = *y.shape[:2], *((side + 1) // 2 for side in y.shape[2:])
    output, winners, positions = (
        torch.empty(shape, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, y.dtype, torch.uint8)
    )
    return output, winners, positions


def _grid_of(windows: Tensor) -> grids.Grid:
    """Return tiles of half the elements, since a window needs several pixels: two programs fit on a multiprocessor."""
    return grids.grid_of(windows, grids.TILE // 2)


@torch.library.custom_op("raydali::batch_norm_pool", mutates_args=())
def normalize_and_pool(
    y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maxima of windows after BatchNorm and ReLU, the pixels that give them, and their positions (uint8).

    Args:
        y: images (N, C, H, W), channels-last.
        mean: see `operators.normalize`, as for those below.
        rstd: see there.
        weight: see there.
        bias: see there.
    """
    windows = _empty_windows(y)
    grid = _grid_of(windows[0])
    pooling_kernels.pool[grid.sweep](
        *(y, *windows, mean, rstd, weight, bias, grid.rows, grid.columns, *y.shape[2:], grid.height),
        **grid.tile | {"stages": 1},
    )
    return windows


@normalize_and_pool.register_fake
def _(y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_windows(y)


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
    """Return the gradients of y (N, C, H, W), and of weight and bias (C, fp32).

    Args:
        grad: a gradient of the output, like the output.
        other: another gradient of the output, which is added.
        y: see `normalize_and_pool`, as for those below.
        winners: what it returned.
        positions: what it returned.
        mean: see there.
        rstd: see there.
        weight: see there.
        bias: see there.
    """
    grid, result = _grid_of(winners), torch.empty_like(y)
    no_signs = empty_signs(winners, None)
    masked, of_weight, of_bias = weight_gradients(
        grad, other, winners, no_signs, mean, rstd, weight, bias, kernels.OUTPUT
    )
    pooling_kernels.gather[grid.sweep](
        *(masked if len(masked) else grad, positions, y, result, mean, rstd, weight, of_weight, of_bias),
        *(grid.rows, grid.columns, *y.shape[2:], y.numel() // grid.columns, grid.height),
        **grid.tile | {"stages": 1},
    )
    return result, of_weight, of_bias


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


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    y, *statistics_and_weights = inputs
    ctx.save_for_backward(y, *output[1:], *statistics_and_weights)


def _backward(ctx: Any, grad: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    grad = grad.contiguous(memory_format=torch.channels_last)
    of_y, of_weight, of_bias = gradients_of_pool(grad, None, *ctx.saved_tensors)
    return of_y, None, None, of_weight, of_bias


normalize_and_pool.register_autograd(_backward, setup_context=_keep)
