"""Triton kernels of BatchNorm with ReLU and max-pooling in one sweep.

The stem of a ResNet ends with them, in its largest tensor. The windows of max-pooling have 3 x 3 pixels, a stride of 2
and a padding of 1. Window (i, j) has its centre at pixel (2i, 2j), so that each pixel is in at most four windows. The
windows of a batch are the rows of a matrix with C columns, as pixels are in kernels.py, whose other kernels are used:

    forward    y                            -- pool -->              output, winners, positions
    backward   grad, other, winners         -- sums_of_gradients --> gradient of weight and bias
               grad or sum, positions, y    -- gather -->            gradient of y

A winner is the pixel of y that gives the maximum, the first one of equal ones; its position is a byte. The gradient of
weight and bias needs winners only. In units of y, the kernels move 1.6, 0.5 (with `other`, 1) and 2.4. Apart from each
other, BatchNorm with ReLU and max-pooling move 3.4 and 6.4, without the addition of gradients.
"""

import triton
import triton.language as tl

from raydali.training.fused.kernels import affine, own_columns, place_of_tile, row_of

WINDOWS = 3, 2, 1
"""Side, stride and padding of the windows."""

_LOSES = tl.constexpr(9)
"""The position if ReLU gives 0 for the whole window, so that no pixel gets the gradient."""


@triton.jit
def _pixel(row, down, right, height, width):
    """Return the number of the pixel that is below and right of each window's centre, and whether it exists."""
    across, along = (width + 1) // 2, (height + 1) // 2
    h, w = row // across % along * 2 + down, row % across * 2 + right
    return (row // (across * along) * height + h) * width + w, (h >= 0) & (h < height) & (w >= 0) & (w < width)


@triton.jit
def pool(
    y,
    output,
    winners,
    positions,
    mean,
    rstd,
    weight,
    bias,
    rows,
    columns,
    height,
    width,
    tiles,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    stages: tl.constexpr,
):
    """Write some tiles of the output, of its winners and of their positions, from the last ones to the first."""
    column, exists = own_columns(columns, block_c)
    of_mean, of_rstd = row_of(mean, column, exists), row_of(rstd, column, exists)
    of_weight, of_bias = row_of(weight, column, exists), row_of(bias, column, exists)
    end = (tl.num_programs(1) - tl.program_id(1)) * tiles
    for step in tl.range(tiles, num_stages=stages):
        place, inside = place_of_tile(end - 1 - step, rows, columns, block_r, block_c)
        row = (end - 1 - step) * block_r + tl.arange(0, block_r)
        best = tl.full((block_r, block_c), float("-inf"), tl.float32)
        winner = tl.zeros((block_r, block_c), tl.float32)
        position = tl.full((block_r, block_c), _LOSES, tl.int32)
        for at in tl.static_range(_LOSES):
            pixel, is_image = _pixel(row, at // 3 - 1, at % 3 - 1, height, width)
            is_pixel = is_image[:, None] & inside
            value = tl.load(y + pixel.to(tl.int64)[:, None] * columns + column[None, :], mask=is_pixel, other=0)
            value = value.to(tl.float32)
            normal = affine(value, of_mean, of_rstd, of_weight, of_bias)
            wins = is_pixel & ((normal <= best) == 0)  # NaN wins, as in torch
            best, winner = tl.where(wins, normal, best), tl.where(wins, value, winner)
            position = tl.where(wins, at, position)
        is_lost = best <= 0
        tl.store(output + place, tl.where(is_lost, 0.0, best).to(output.dtype.element_ty), mask=inside)
        tl.store(winners + place, winner.to(winners.dtype.element_ty), mask=inside)
        tl.store(positions + place, tl.where(is_lost, _LOSES, position).to(tl.uint8), mask=inside)


@triton.jit
def _window(grad, positions, row, exists, column, columns):
    """Return the gradient of windows, and the position of their winners."""
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    gradient = tl.load(grad + place, mask=exists, other=0).to(tl.float32)
    return gradient, tl.load(positions + place, mask=exists, other=_LOSES).to(tl.int32)


@triton.jit
def gather(
    grad,
    positions,
    y,
    result,
    mean,
    rstd,
    weight,
    of_weight,
    of_bias,
    rows,
    columns,
    height,
    width,
    pixels,
    tiles,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    stages: tl.constexpr,
):
    """Write the gradient of y, from the last windows to the first: of four pixels each, which gather from windows."""
    column, exists = own_columns(columns, block_c)
    own_mean, own_rstd = row_of(mean, column, exists), row_of(rstd, column, exists)
    factor = row_of(weight, column, exists) * own_rstd
    level = row_of(of_bias, column, exists) / pixels
    slope = row_of(of_weight, column, exists) / pixels * own_rstd
    across, along = (width + 1) // 2, (height + 1) // 2
    end = (tl.num_programs(1) - tl.program_id(1)) * tiles
    for step in tl.range(tiles, num_stages=stages):
        row = (end - 1 - step) * block_r + tl.arange(0, block_r)
        inside = (row < rows)[:, None] & exists[None, :]
        has_right = inside & (row % across + 1 < across)[:, None]
        has_below = inside & (row // across % along + 1 < along)[:, None]
        own, at_own = _window(grad, positions, row, inside, column, columns)
        right, at_right = _window(grad, positions, row + 1, has_right, column, columns)
        below, at_below = _window(grad, positions, row + across, has_below, column, columns)
        last, at_last = _window(grad, positions, row + across + 1, has_right & has_below, column, columns)
        for at in tl.static_range(4):
            if at == 0:  # the centre of the own window
                gradient = tl.where(at_own == 4, own, 0.0)
            elif at == 1:
                gradient = tl.where(at_own == 5, own, 0.0) + tl.where(at_right == 3, right, 0.0)
            elif at == 2:
                gradient = tl.where(at_own == 7, own, 0.0) + tl.where(at_below == 1, below, 0.0)
            else:
                gradient = tl.where(at_own == 8, own, 0.0) + tl.where(at_right == 6, right, 0.0)
                gradient += tl.where(at_below == 2, below, 0.0) + tl.where(at_last == 0, last, 0.0)
            pixel, is_image = _pixel(row, at // 2, at % 2, height, width)
            place, is_pixel = pixel.to(tl.int64)[:, None] * columns + column[None, :], is_image[:, None] & inside
            value = tl.load(y + place, mask=is_pixel, other=0).to(tl.float32)
            gradient = (gradient - level - (value - own_mean) * slope) * factor
            tl.store(result + place, gradient.to(result.dtype.element_ty), mask=is_pixel)
