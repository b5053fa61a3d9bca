"""Launches of the kernels: which programs compute a layer, and the tensors that they write.

The settings below do not depend on the GPU, so that results are the same on each.
"""

from dataclasses import dataclass

import torch
import triton

from raydali.train.fused import kernels

TILE = 4096
"""Elements that a program holds at a time."""
REDUCING = 132 * 6
"""Largest number of programs of a reduction; an H100 or H200 has 132 multiprocessors."""
SWEEPING = 132 * 32
"""Largest number of programs of a kernel without a reduction, which need not be few."""
WARPS = 8
"""Warps of each program."""
STAGES = 3
"""Tiles of each program that are read at a time, asynchronously."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """How kernels divide a matrix of rows and columns."""

    rows: int
    columns: int
    elements: int
    """Elements of a tile."""

    @property
    def tile(self) -> dict[str, int]:
        """The rows and columns of a tile, and how a program reads tiles."""
        block_c = min(128, triton.next_power_of_2(self.columns))
        return {"block_r": self.elements // block_c, "block_c": block_c, "stages": STAGES, "num_warps": WARPS}

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles: next to each other, and one above another."""
        return triton.cdiv(self.columns, self.tile["block_c"]), triton.cdiv(self.rows, self.tile["block_r"])

    @property
    def reduction(self) -> tuple[int, int]:
        """The programs of a reduction, each for every `reduction[1]`-th tile of some columns."""
        across, down = self.tiles
        return across, max(1, min(REDUCING // across, down // STAGES))

    @property
    def height(self) -> int:
        """Number of tiles, one above another, of each program of a kernel without a reduction."""
        across, down = self.tiles
        return int(triton.cdiv(across * down, SWEEPING))

    @property
    def sweep(self) -> tuple[int, int]:
        """The programs of a kernel without a reduction."""
        across, down = self.tiles
        return across, int(triton.cdiv(down, self.height))

    @property
    def completion(self) -> dict[str, int]:
        """The partial sums and columns of a program that completes sums."""
        block_s = triton.next_power_of_2(self.reduction[1])
        return {"block_s": block_s, "block_c": max(1, min(32, TILE // block_s)), "num_warps": WARPS}

    @property
    def completing(self) -> tuple[int]:
        """The programs that complete sums."""
        return (triton.cdiv(self.columns, self.completion["block_c"]),)

    def partial(self, like: torch.Tensor) -> Pair:
        """Make room for two partial sums of each program of a reduction."""
        size = (2, self.reduction[1], self.columns)
        first, second = like.new_empty(size, dtype=torch.float32)
        return first, second


def grid_of(y: torch.Tensor, elements: int | None = None) -> Grid:
    """Return how kernels divide images, into tiles of TILE elements or of others."""
    return Grid(y.numel() // y.shape[1], y.shape[1], elements or TILE)


def statistics(
    y: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float, eps: float
) -> Pair:
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


def normalize(
    y: torch.Tensor,
    residual: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    relu: bool,
) -> Pair:
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


def empty_signs(y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return bytes for the signs of y plus the residual; none without a residual."""
    return y.new_empty(0 if residual is None else y.numel() // kernels.SIGNS, dtype=torch.uint8)


def empty_masked(y: torch.Tensor, other: torch.Tensor | None, signs: torch.Tensor) -> torch.Tensor:
    """Return room for the masked gradient, if it is written, because it would cost more to compute it twice."""
    return torch.empty_like(y) if other is not None or len(signs) else y.new_empty(0)


def gradients(
    grad: torch.Tensor,
    other: torch.Tensor | None,
    y: torch.Tensor,
    signs: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def weight_gradients(
    grad: torch.Tensor,
    other: torch.Tensor | None,
    y: torch.Tensor,
    signs: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mask: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the masked gradient, if `empty_masked` has room for it, and the gradients of weight and bias (C, fp32).

    Args:
        grad: see `gradients`, as for those below.
        other: see there.
        y: see there.
        signs: see there.
        mean: see there.
        rstd: see there.
        weight: see there.
        bias: see there.
        mask: where the mask of ReLU comes from, see kernels.
    """
    grid, masked = grid_of(y), empty_masked(y, other, signs)
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
