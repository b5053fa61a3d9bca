"""Triton kernels of BatchNorm with addition and ReLU, for images in channels-last order.

A batch of images is a matrix of N*H*W rows and C columns. Four kernels sweep over it; two small ones complete sums:

    forward    y                     -- moments, complete_moments -->       mean, rstd, running statistics
               y, residual           -- normalize -->                       output, signs
    backward   grad, other, y, signs -- sums_of_gradients, complete_sums --> masked gradient, of weight and bias
               masked gradient, y    -- input_gradient -->                  gradient of y

What they move, in units of N*C*H*W elements. For an image, ResNet-50 has 4.1 M elements in layers of BatchNorm + ReLU,
5.5 M in those with an addition, and 1.5 M in BatchNorm alone, which costs as much as BatchNorm + ReLU.

| kernel            | BatchNorm + ReLU       | BatchNorm + addition + ReLU                              |
|-------------------|------------------------|----------------------------------------------------------|
| moments           | reads y: 1             | reads y: 1                                               |
| normalize         | y, writes output: 2    | y, residual, writes output, signs (1/16 in bf16): 3.06   |
| sums_of_gradients | grad, y: 2             | grad, other, y, signs, writes masked gradient: 4.06      |
| input_gradient    | grad, y, writes own: 3 | masked gradient, y, writes own: 3                        |
| together          | 8                      | 11.1; `other` replaces an addition of two gradients by 3 |

ReLU's mask is computed again from y, which is read anyway. After an addition it would need the residual or the output
once more, so that one bit an element is kept instead. The masked gradient is the residual's gradient: the last kernel
reads it. Each second sweep starts at the end, which the L2 cache still holds, and ends where the next kernel begins.

Statistics are fp32, by Welford's algorithm on differences from the first row, so that a large mean costs no precision.
Sums have a fixed order: results are the same in each run.
"""

import triton
import triton.language as tl

SIGNS = 8
"""Signs that are packed into a byte, of neighbouring channels; 8 values of bf16 are what a thread reads at once."""

NOWHERE, OUTPUT, PACKED = range(3)
"""They say where the mask of ReLU comes from."""

_SIGNS = tl.constexpr(SIGNS)
_OUTPUT, _PACKED = tl.constexpr(OUTPUT), tl.constexpr(PACKED)


@triton.jit
def own_columns(columns, block_c: tl.constexpr):
    """Return the columns of this program's tiles, and which of them exist."""
    column = tl.program_id(0) * block_c + tl.arange(0, block_c)
    return column, column < columns


@triton.jit
def place_of_tile(tile, rows, columns, block_r: tl.constexpr, block_c: tl.constexpr):
    """Return the places of a tile's values in the matrix, and which of them exist."""
    row = tile.to(tl.int64) * block_r + tl.arange(0, block_r)
    column, exists = own_columns(columns, block_c)
    return row[:, None] * columns + column[None, :], (row < rows)[:, None] & exists[None, :]


@triton.jit
def _place_of_signs(tile, rows, columns, block_r: tl.constexpr, block_c: tl.constexpr):
    """Return the places of the bytes with a tile's signs, and which of them exist."""
    row = tile.to(tl.int64) * block_r + tl.arange(0, block_r)
    column = tl.program_id(0) * (block_c // _SIGNS) + tl.arange(0, block_c // _SIGNS)
    exists = (row < rows)[:, None] & (column < columns // _SIGNS)[None, :]
    return row[:, None] * (columns // _SIGNS) + column[None, :], exists


@triton.jit
def row_of(values, column, exists):
    """Return the values of these columns, as a row."""
    return tl.load(values + column, mask=exists)[None, :]


@triton.jit
def affine(value, mean, rstd, weight, bias):
    """Return normalised values; the same arithmetic in both directions, so that ReLU's mask is the same."""
    return (value - mean) * (weight * rstd) + bias


@triton.jit
def moments(y, means, squares, rows, columns, block_r: tl.constexpr, block_c: tl.constexpr, stages: tl.constexpr):
    """Write the mean and the sum of squared deviations of every n-th tile's values, less the first row's values."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    column, exists = own_columns(columns, block_c)
    shift = tl.load(y + column, mask=exists, other=0).to(tl.float32)[None, :]
    mean = tl.zeros((block_r, block_c), tl.float32)
    square = tl.zeros((block_r, block_c), tl.float32)
    tiles = tl.cdiv(rows, block_r)
    steps = tl.cdiv(tiles - split, splits)
    for step in tl.range(steps, num_stages=stages):
        place, inside = place_of_tile(split + step * splits, rows, columns, block_r, block_c)
        value = tl.load(y + place, mask=inside, other=0).to(tl.float32) - shift
        delta = tl.where(inside, value - mean, 0.0)
        mean += delta * (1.0 / (step + 1))
        square += delta * (value - mean)
    # Only the last tile of all may have fewer rows.
    last = (split + (steps - 1) * splits) * block_r + tl.arange(0, block_r)
    count = (steps - tl.where(last < rows, 0, 1)).to(tl.float32)[:, None]
    of_all = tl.sum(count * mean, 0) / tl.sum(count, 0)
    deviation = mean - of_all[None, :]
    total = tl.sum(square + count * deviation * deviation, 0)
    tl.store(means + split * columns + column, of_all, mask=exists)
    tl.store(squares + split * columns + column, total, mask=exists)


@triton.jit
def _partial(sums, column, exists, columns, splits, block_s: tl.constexpr):
    """Return the partial sums of these columns; 0 where there is none."""
    split = tl.arange(0, block_s)[:, None]
    return tl.load(sums + split * columns + column[None, :], mask=(split < splits) & exists[None, :], other=0)


@triton.jit
def complete_moments(
    y,
    means,
    squares,
    mean,
    rstd,
    running_mean,
    running_var,
    rows,
    columns,
    splits,
    momentum,
    eps,
    block_r: tl.constexpr,
    block_s: tl.constexpr,
    block_c: tl.constexpr,
):
    """Write the statistics of some columns from their parts, and update the running ones."""
    column, exists = own_columns(columns, block_c)
    split = tl.arange(0, block_s)
    tiles = tl.cdiv(rows, block_r)
    own = tl.where(split < splits, tl.cdiv(tiles - split, splits) * block_r, 0)
    count = tl.where(split == (tiles - 1) % splits, own - (tiles * block_r - rows), own).to(tl.float32)[:, None]
    part = _partial(means, column, exists, columns, splits, block_s)
    shifted = tl.sum(part * count, 0) / rows
    deviation = part - shifted[None, :]
    square = tl.sum(_partial(squares, column, exists, columns, splits, block_s) + count * deviation * deviation, 0)
    of_batch = tl.load(y + column, mask=exists, other=0).to(tl.float32) + shifted
    tl.store(mean + column, of_batch, mask=exists)
    tl.store(rstd + column, 1.0 / tl.sqrt_rn(square / rows + eps), mask=exists)
    past_mean = tl.load(running_mean + column, mask=exists)
    past_var = tl.load(running_var + column, mask=exists)
    tl.store(running_mean + column, past_mean + momentum * (of_batch - past_mean), mask=exists)
    tl.store(running_var + column, past_var + momentum * (square / (rows - 1) - past_var), mask=exists)


@triton.jit
def combine_moments(
    of_ranks,
    mean,
    rstd,
    running_mean,
    running_var,
    rows,
    columns,
    ranks: tl.constexpr,
    momentum,
    eps,
    block_c: tl.constexpr,
):
    """Write the statistics of some columns from the mean and the unbiased variance of each rank's rows."""
    column, exists = own_columns(columns, block_c)
    of_all = tl.zeros((block_c,), tl.float32)
    for rank in tl.static_range(ranks):
        of_all += tl.load(of_ranks + 2 * rank * columns + column, mask=exists, other=0) / ranks
    square = tl.zeros((block_c,), tl.float32)
    for rank in tl.static_range(ranks):
        deviation = tl.load(of_ranks + 2 * rank * columns + column, mask=exists, other=0) - of_all
        variance = tl.load(of_ranks + (2 * rank + 1) * columns + column, mask=exists, other=0)
        square += variance * (rows - 1) + rows * deviation * deviation
    tl.store(mean + column, of_all, mask=exists)
    tl.store(rstd + column, 1.0 / tl.sqrt_rn(square / (rows * ranks) + eps), mask=exists)
    past_mean = tl.load(running_mean + column, mask=exists)
    past_var = tl.load(running_var + column, mask=exists)
    tl.store(running_mean + column, past_mean + momentum * (of_all - past_mean), mask=exists)
    tl.store(running_var + column, past_var + momentum * (square / (rows * ranks - 1) - past_var), mask=exists)


@triton.jit
def normalize(
    y,
    residual,
    output,
    signs,
    mean,
    rstd,
    weight,
    bias,
    rows,
    columns,
    tiles,
    adds: tl.constexpr,
    relu: tl.constexpr,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    stages: tl.constexpr,
):
    """Write some tiles of the output and of its signs, from the last ones to the first."""
    column, exists = own_columns(columns, block_c)
    of_mean, of_rstd = row_of(mean, column, exists), row_of(rstd, column, exists)
    of_weight, of_bias = row_of(weight, column, exists), row_of(bias, column, exists)
    end = (tl.num_programs(1) - tl.program_id(1)) * tiles
    for step in tl.range(tiles, num_stages=stages):
        place, inside = place_of_tile(end - 1 - step, rows, columns, block_r, block_c)
        value = tl.load(y + place, mask=inside, other=0).to(tl.float32)
        value = affine(value, of_mean, of_rstd, of_weight, of_bias)
        if adds:
            value += tl.load(residual + place, mask=inside, other=0).to(tl.float32)
            is_kept = tl.where(value <= 0, 0, 1)  # NaN is kept, as in torch
            bits = tl.reshape(is_kept, (block_r, block_c // _SIGNS, _SIGNS)) << tl.arange(0, _SIGNS)[None, None, :]
            of_signs, existing = _place_of_signs(end - 1 - step, rows, columns, block_r, block_c)
            tl.store(signs + of_signs, tl.sum(bits, 2).to(tl.uint8), mask=existing)
        if relu:
            value = tl.where(value <= 0, 0.0, value)
        tl.store(output + place, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def sums_of_gradients(
    grad,
    other,
    y,
    signs,
    masked,
    mean,
    rstd,
    weight,
    bias,
    sums,
    products,
    rows,
    columns,
    adds: tl.constexpr,
    mask: tl.constexpr,
    writes: tl.constexpr,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    stages: tl.constexpr,
):
    """Write the sums of the gradient, and of its product with y - mean, over every n-th tile; and it, masked."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    column, exists = own_columns(columns, block_c)
    of_mean, of_rstd = row_of(mean, column, exists), row_of(rstd, column, exists)
    of_weight, of_bias = row_of(weight, column, exists), row_of(bias, column, exists)
    total = tl.zeros((block_r, block_c), tl.float32)
    product = tl.zeros((block_r, block_c), tl.float32)
    for step in tl.range(tl.cdiv(tl.cdiv(rows, block_r) - split, splits), num_stages=stages):
        tile = split + step * splits
        place, inside = place_of_tile(tile, rows, columns, block_r, block_c)
        gradient = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
        value = tl.load(y + place, mask=inside, other=0).to(tl.float32)
        if adds:
            gradient += tl.load(other + place, mask=inside, other=0).to(tl.float32)
        if mask == _OUTPUT:
            gradient = tl.where(affine(value, of_mean, of_rstd, of_weight, of_bias) <= 0, 0.0, gradient)
        if mask == _PACKED:
            of_signs, existing = _place_of_signs(tile, rows, columns, block_r, block_c)
            packed = tl.load(signs + of_signs, mask=existing, other=0).to(tl.int32)
            bits = (packed[:, :, None] >> tl.arange(0, _SIGNS)[None, None, :]) & 1
            gradient = tl.where(tl.reshape(bits, (block_r, block_c)) == 0, 0.0, gradient)
        if writes:
            tl.store(masked + place, gradient.to(masked.dtype.element_ty), mask=inside)
        total += gradient
        product += gradient * (value - of_mean)
    tl.store(sums + split * columns + column, tl.sum(total, 0), mask=exists)
    tl.store(products + split * columns + column, tl.sum(product, 0), mask=exists)


@triton.jit
def complete_sums(
    sums, products, rstd, of_weight, of_bias, columns, splits, block_s: tl.constexpr, block_c: tl.constexpr
):
    """Write the gradients of weight and bias of some columns."""
    column, exists = own_columns(columns, block_c)
    product = tl.sum(_partial(products, column, exists, columns, splits, block_s), 0)
    total = tl.sum(_partial(sums, column, exists, columns, splits, block_s), 0)
    tl.store(of_weight + column, product * tl.load(rstd + column, mask=exists), mask=exists)
    tl.store(of_bias + column, total, mask=exists)


@triton.jit
def input_gradient(
    grad,
    y,
    result,
    mean,
    rstd,
    weight,
    bias,
    of_weight,
    of_bias,
    rows,
    columns,
    tiles,
    masks: tl.constexpr,
    block_r: tl.constexpr,
    block_c: tl.constexpr,
    stages: tl.constexpr,
):
    """Write some tiles of the gradient of y, from the last ones to the first."""
    column, exists = own_columns(columns, block_c)
    own_mean, own_rstd = row_of(mean, column, exists), row_of(rstd, column, exists)
    own_weight, own_bias = row_of(weight, column, exists), row_of(bias, column, exists)
    level = row_of(of_bias, column, exists) / rows
    slope = row_of(of_weight, column, exists) / rows * own_rstd
    end = (tl.num_programs(1) - tl.program_id(1)) * tiles
    for step in tl.range(tiles, num_stages=stages):
        place, inside = place_of_tile(end - 1 - step, rows, columns, block_r, block_c)
        gradient = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
        value = tl.load(y + place, mask=inside, other=0).to(tl.float32)
        if masks:
            gradient = tl.where(affine(value, own_mean, own_rstd, own_weight, own_bias) <= 0, 0.0, gradient)
        gradient = (gradient - level - (value - own_mean) * slope) * (own_weight * own_rstd)
        tl.store(result + place, gradient.to(result.dtype.element_ty), mask=inside)
