"""Launches of the kernels of BatchNorm with ReLU and max-pooling, and the tensors that they write."""

import torch

from raydali.train.fused import kernels, launches, pooling_kernels

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_windows(y: torch.Tensor) -> Tensors:
    """Return room for the output, the winners and their positions: images (N, C, (H + 1) // 2, (W + 1) // 2)."""
    shape = *y.shape[:2], *((side + 1) // 2 for side in y.shape[2:])
    output, winners, positions = (
        torch.empty(shape, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, y.dtype, torch.uint8)
    )
    return output, winners, positions


def _grid_of(windows: torch.Tensor) -> launches.Grid:
    """Return tiles of half the elements, since a window needs several pixels: two programs fit on a multiprocessor."""
    return launches.grid_of(windows, launches.TILE // 2)


def normalize_and_pool(
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Tensors:
    """Return the maxima of windows after BatchNorm and ReLU, the pixels that give them, and their positions (uint8).

    Args:
        y: images (N, C, H, W), channels-last.
        mean: see `launches.normalize`, as for those below.
        rstd: see there.
        weight: see there.
        bias: see there.
    """
    windows = empty_windows(y)
    grid = _grid_of(windows[0])
    pooling_kernels.pool[grid.sweep](
        *(y, *windows, mean, rstd, weight, bias, grid.rows, grid.columns, *y.shape[2:], grid.height),
        **grid.tile | {"stages": 1},
    )
    return windows


def gradients(
    grad: torch.Tensor,
    other: torch.Tensor | None,
    y: torch.Tensor,
    winners: torch.Tensor,
    positions: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> Tensors:
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
    no_signs = launches.empty_signs(winners, None)
    masked, of_weight, of_bias = launches.weight_gradients(
        grad, other, winners, no_signs, mean, rstd, weight, bias, kernels.OUTPUT
    )
    pooling_kernels.gather[grid.sweep](
        *(masked if len(masked) else grad, positions, y, result, mean, rstd, weight, of_weight, of_bias),
        *(grid.rows, grid.columns, *y.shape[2:], y.numel() // grid.columns, grid.height),
        **grid.tile | {"stages": 1},
    )
    return result, of_weight, of_bias
