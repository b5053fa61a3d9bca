"""BatchNorm with addition, ReLU and max-pooling as operators of torch, which torch.compile and CUDA graphs take.

Each launches kernels of kernels.py or pooling_kernels.py. Statistics and normalisation are two operators, because one
that changes its inputs, as running statistics are, cannot have a gradient. How kernels divide images among their
programs does not depend on the GPU, so that results are the same on each. With the name of a process group, the
statistics cover the images of all its ranks, which must be equally many.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

from raydali.training.fused import kernels, pooling_kernels

Tensor = torch.Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if Triton interprets its kernels on the host, which tests ask for."""
TILE = 4096
"""Elements that a program holds at a time."""
REDUCING = 132 * 6
"""Largest number of programs of a reduction; an H100 or H200 has 132 multiprocessors."""
SWEEPING = 132 * 32
"""Largest number of programs of a kernel without a reduction, which need not be few."""
COMBINED = 128
"""Columns of each program that combines the statistics of ranks."""
WARPS = 8
"""Warps of each program."""
STAGES = 3
"""Tiles of each program that are read at a time, asynchronously."""


class Grid:
    """How kernels divide images (N, C, H, W), a matrix of N*H*W rows and C columns, into tiles.

    Attributes:
        size: number of rows and of columns.
        tile: rows and columns of a tile, and how a program reads tiles.
        reduction: the programs of a reduction, each for every `reduction[1]`-th tile of some columns.
        sweep: the programs of a kernel without a reduction.
        height: number of tiles, one above another, of each of these.
        completion: the partial sums and columns of a program that completes sums.
        completing: the programs that complete sums.
    """

    def __init__(self, y: Tensor, elements: int | None = None) -> None:
        self.size = rows, columns = y.numel() // y.shape[1], y.shape[1]
        block_c = min(128, triton.next_power_of_2(columns))
        block_r = (elements or TILE) // block_c
        self.tile = {"block_r": block_r, "block_c": block_c, "stages": STAGES, "num_warps": WARPS}
        across, down = triton.cdiv(columns, block_c), triton.cdiv(rows, block_r)
        self.reduction = across, max(1, min(REDUCING // across, down // STAGES))
        self.height = triton.cdiv(across * down, SWEEPING)
        self.sweep = across, triton.cdiv(down, self.height)
        block_s = triton.next_power_of_2(self.reduction[1])
        self.completion = {"block_s": block_s, "block_c": max(1, min(32, TILE // block_s)), "num_warps": WARPS}
        self.completing = (triton.cdiv(columns, self.completion["block_c"]),)

    def partial(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for two partial sums of each program of a reduction."""
        first, second = like.new_empty((2, self.reduction[1], self.size[1]), dtype=torch.float32)
        return first, second


@torch.library.custom_op("raydali::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def statistics(
    y: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float, group: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the mean and 1 / sqrt(variance + eps) of each channel (C, fp32), and update the running statistics.

    Args:
        y: images (N, C, H, W), channels-last, as all images here.
        running_mean: (C), fp32.
        running_var: (C), fp32: of the unbiased variance.
        momentum: share of this batch in the running statistics.
        eps: is added to the variance.
        group: name of the process group; empty for this rank alone.
    """
    grid = Grid(y)
    means, squares = grid.partial(y)
    mean, rstd = torch.empty_like(running_mean), torch.empty_like(running_mean)
    kernels.moments[grid.reduction](y, means, squares, *grid.size, **grid.tile)
    own = running_mean.new_zeros(2, len(mean)) if group else (running_mean, running_var)
    kernels.complete_moments[grid.completing](
        *(y, means, squares, mean, rstd, *own, *grid.size, grid.reduction[1], 1.0 if group else momentum, eps),
        block_r=grid.tile["block_r"],
        **grid.completion,
    )
    if isinstance(own, Tensor):
        of_group = _resolve_process_group(GroupName(group))
        ranks = dist.get_world_size(of_group)
        of_ranks = own.repeat(ranks, 1)
        dist.all_gather_into_tensor(of_ranks, own, of_group)
        running = mean, rstd, running_mean, running_var
        kernels.combine_moments[(triton.cdiv(len(mean), COMBINED),)](
            of_ranks, *running, *grid.size, ranks, momentum, eps, block_c=COMBINED
        )
    return mean, rstd


def _mean_over_ranks(tensors: tuple[Tensor, Tensor], group: str) -> tuple[Tensor, Tensor]:
    """Return the means of two tensors (C) over the ranks of a process group; without a group, the tensors."""
    if not group:
        return tensors
    of_group = _resolve_process_group(GroupName(group))
    both = torch.stack(tensors) / dist.get_world_size(of_group)
    dist.all_reduce(both, group=of_group)
    first, second = both
    return first, second


@statistics.register_fake
def _(_y: Tensor, running_mean: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_mean)


@torch.library.custom_op("raydali::batch_norm_normalize", mutates_args=())
def normalize(
    y: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    relu: bool,
    group: str = "",  # noqa: ARG001  # for the gradients
) -> tuple[Tensor, Tensor]:
    """Return the normalised images, or their sum with the residual, through ReLU if so; and the signs of sums, packed.

    Args:
        y: images (N, C, H, W).
        residual: images like y; C is then a multiple of kernels.SIGNS, and relu is true.
        mean: the mean of each channel (C, fp32).
        rstd: 1 / sqrt(variance + eps) of each channel (C, fp32).
        weight: (C), fp32.
        bias: (C), fp32.
        relu: whether to apply ReLU.
        group: see `statistics`, for the gradients.
    """
    grid, output, signs = Grid(y), torch.empty_like(y), _empty_signs(y, residual)
    kernels.normalize[grid.sweep](
        *(y, y if residual is None else residual, output, signs, mean, rstd, weight, bias, *grid.size, grid.height),
        adds=residual is not None,
        relu=relu,
        **grid.tile,
    )
    return output, signs


@normalize.register_fake
def _(y: Tensor, residual: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), _empty_signs(y, residual)


def _empty_signs(y: Tensor, residual: Tensor | None = None) -> Tensor:
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
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y and of the residual (N, C, H, W; empty for none), and of weight and bias (C, fp32).

    The gradient of the output is `grad`, plus `other` if there is one. `normalize` returned the signs and took the
    other arguments.
    """
    grid, result = Grid(y), torch.empty_like(y)
    mask = kernels.NOWHERE if not relu else kernels.PACKED if len(signs) else kernels.OUTPUT
    masked, of_weight, of_bias = _weight_gradients(grad, other, y, signs, mean, rstd, weight, bias, mask)
    is_masked = len(masked) > 0
    kernels.input_gradient[grid.sweep](
        *(masked if is_masked else grad, y, result, mean, rstd, weight, bias),
        *_mean_over_ranks((of_weight, of_bias), group),
        *(*grid.size, grid.height),
        masks=mask == kernels.OUTPUT and not is_masked,
        **grid.tile,
    )
    return result, masked, of_weight, of_bias


@gradients.register_fake
def _(
    _grad: Tensor, other: Tensor | None, y: Tensor, signs: Tensor, mean: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(y), _empty_masked(y, other, signs), torch.empty_like(mean), torch.empty_like(mean)


def _empty_masked(y: Tensor, other: Tensor | None, signs: Tensor) -> Tensor:
    """Return room for the masked gradient, if it is written, because it would cost more to compute it twice."""
    return torch.empty_like(y) if other is not None or len(signs) else y.new_empty(0)


def _weight_gradients(
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

    `gradients` explains the arguments; `mask` says where ReLU's mask comes from, see kernels.
    """
    grid, masked = Grid(y), _empty_masked(y, other, signs)
    sums, products = grid.partial(y)
    of_weight, of_bias = torch.empty_like(mean), torch.empty_like(mean)
    kernels.sums_of_gradients[grid.reduction](
        *(grad, grad if other is None else other, y, signs, masked, mean, rstd, weight, bias, sums, products),
        *grid.size,
        adds=other is not None,
        mask=mask,
        writes=len(masked) > 0,
        **grid.tile,
    )
    kernels.complete_sums[grid.completing](
        sums, products, rstd, of_weight, of_bias, grid.size[1], grid.reduction[1], **grid.completion
    )
    return masked, of_weight, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    y, residual, *statistics_and_weights, ctx.relu, ctx.group = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(y, output[1], *statistics_and_weights)


def _backward(ctx: Any, grad: Tensor, _of_signs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    """Return the gradients of the inputs; the gradient of y includes what it gets by its statistics."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    of_y, of_residual, of_weight, of_bias = gradients(grad, None, *ctx.saved_tensors, ctx.relu, ctx.group)
    return of_y, of_residual if ctx.has_residual else None, None, None, of_weight, of_bias, None, None


normalize.register_autograd(_backward, setup_context=_keep)

# ---------------------------------------------------------------------------------------------------------------------
# With max-pooling


def _empty_windows(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the output, the winners and their positions: images (N, C, (H + 1) // 2, (W + 1) // 2)."""
    shape = *y.shape[:2], *((side + 1) // 2 for side in y.shape[2:])
    output, winners, positions = (
        torch.empty(shape, dtype=dtype, device=y.device, memory_format=torch.channels_last)
        for dtype in (y.dtype, y.dtype, torch.uint8)
    )
    return output, winners, positions


def _grid_of_windows(windows: Tensor) -> Grid:
    """Return tiles of half the elements, since a window needs several pixels: two programs fit on a multiprocessor."""
    grid = Grid(windows, TILE // 2)
    grid.tile["stages"] = 1
    return grid


@torch.library.custom_op("raydali::batch_norm_pool", mutates_args=())
def normalize_and_pool(
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    group: str = "",  # noqa: ARG001  # for the gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maxima of windows after BatchNorm and ReLU, the pixels that give them, and their positions (uint8).

    `normalize` explains the arguments.
    """
    windows = _empty_windows(y)
    grid = _grid_of_windows(windows[0])
    pooling_kernels.pool[grid.sweep](
        *(y, *windows, mean, rstd, weight, bias, *grid.size, *y.shape[2:], grid.height), **grid.tile
    )
    return windows


@normalize_and_pool.register_fake
def _(y: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
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
    group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y (N, C, H, W), and of weight and bias (C, fp32).

    The gradient of the output is `grad`, plus `other` if there is one. `normalize_and_pool` returned the winners and
    their positions, and took the other arguments.
    """
    grid, result = _grid_of_windows(winners), torch.empty_like(y)
    masked, of_weight, of_bias = _weight_gradients(
        grad, other, winners, _empty_signs(winners), mean, rstd, weight, bias, kernels.OUTPUT
    )
    pooling_kernels.gather[grid.sweep](
        *(masked if len(masked) else grad, positions, y, result, mean, rstd, weight),
        *_mean_over_ranks((of_weight, of_bias), group),
        *(*grid.size, *y.shape[2:], y.numel() // y.shape[1], grid.height),
        **grid.tile,
    )
    return result, of_weight, of_bias


@gradients_of_pool.register_fake
def _(
    _grad: Tensor, _other: Tensor | None, y: Tensor, _winners: Tensor, _positions: Tensor, mean: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(mean), torch.empty_like(mean)


def _keep_windows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    y, *statistics_and_weights, ctx.group = inputs
    ctx.save_for_backward(y, *output[1:], *statistics_and_weights)


def _backward_of_windows(ctx: Any, grad: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    grad = grad.contiguous(memory_format=torch.channels_last)
    of_y, of_weight, of_bias = gradients_of_pool(grad, None, *ctx.saved_tensors, ctx.group)
    return of_y, None, None, of_weight, of_bias, None


normalize_and_pool.register_autograd(_backward_of_windows, setup_context=_keep_windows)
