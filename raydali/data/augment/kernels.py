"""Augmentation on a GPU: two Triton kernels for each operation of a chain, whatever the operation of each image.

    tables (N x chains, 3, 256)  <-- _tables: the images that map values; a histogram where statistics are needed
    images  -- _apply: a table, a colour operation, a filter or a warp; erasing after the last one -->  images

All programs of an image take the same branch, so that each image costs what its own operation costs. AugMix has a
third kernel, which mixes its chains. Sums of products are taken in float64, which rounds to float32 as the fused
operations of torch do: tables equal torchvision's bit for bit, unless a mean differs in its last bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from raydali.data.augment.operations import BLUR_RADIUS, TABLES, WIDTH, Kind

Colour = Sequence[int]

BLOCK = 2048
"""Values of one program, where a value is one channel of a pixel."""

_WIDTH = tl.constexpr(WIDTH)
_RADIUS = tl.constexpr(BLUR_RADIUS)
_LAST_TABLE = tl.constexpr(TABLES[-1])
_BRIGHTNESS, _CONTRAST = tl.constexpr(int(Kind.BRIGHTNESS)), tl.constexpr(int(Kind.CONTRAST))
_POSTERIZE, _SOLARIZE = tl.constexpr(int(Kind.POSTERIZE)), tl.constexpr(int(Kind.SOLARIZE))
_SOLARIZE_ADD, _AUTOCONTRAST = tl.constexpr(int(Kind.SOLARIZE_ADD)), tl.constexpr(int(Kind.AUTOCONTRAST))
_EQUALIZE, _SATURATION = tl.constexpr(int(Kind.EQUALIZE)), tl.constexpr(int(Kind.SATURATION))
_HUE, _SHARPNESS = tl.constexpr(int(Kind.HUE)), tl.constexpr(int(Kind.SHARPNESS))
_BLUR_ROWS, _BLUR_COLUMNS = tl.constexpr(int(Kind.BLUR_ROWS)), tl.constexpr(int(Kind.BLUR_COLUMNS))
_WARP = tl.constexpr(int(Kind.WARP))


def augmented(
    images: torch.Tensor,
    plans: torch.Tensor,
    *,
    slots: int,
    chains: int,
    fill: Colour,
    colour: Colour,
    nearest: bool,
) -> torch.Tensor:
    """Return the augmented images; the arguments are as in cpu.py, on a GPU."""
    count, _, height, width = images.shape
    images = images.contiguous(memory_format=torch.channels_last)
    tables = torch.empty((count * chains, 3, 256), dtype=torch.uint8, device=images.device)
    blocks = triton.cdiv(height * width * 3, BLOCK)
    newest = images
    for slot in range(max(1, slots)):
        results = images.new_empty((count * chains, height, width, 3)).permute(0, 3, 1, 2)
        of_one = count * chains // len(newest)  # all chains of an image start from it
        if slots:
            _tables[count * chains, 3](newest, plans, tables, slot, slots, chains, of_one, height * width, block=BLOCK)
        _apply[blocks, count * chains](
            newest,
            results,
            plans,
            tables,
            slot,
            slots,
            chains,
            of_one,
            height,
            width,
            _packed(fill),
            _packed(colour),
            erases=chains == 1 and slot + 1 >= slots,
            takes_nearest=nearest,
            block=BLOCK,
        )
        newest = results
    if chains == 1:
        return newest
    mixed = torch.empty_like(images)
    _mix[blocks, count](images, newest, mixed, plans, slots, chains, height, width, _packed(colour), block=BLOCK)
    return mixed


def _packed(colour: Colour) -> int:
    """Return a colour as one number: red, green and blue from bit 0, 8 and 16 on."""
    red, green, blue = colour
    return red | green << 8 | blue << 16


@triton.jit
def _grey(red, green, blue):
    """Return the luma of torchvision, rounded down; its float32 sums are fused."""
    sums = (red.to(tl.float32) * 0.2989).to(tl.float64)
    sums = (sums + green.to(tl.float64) * tl.full((), 0.587, tl.float32).to(tl.float64)).to(tl.float32).to(tl.float64)
    sums = (sums + blue.to(tl.float64) * tl.full((), 0.114, tl.float32).to(tl.float64)).to(tl.float32)
    return tl.floor(sums)


@triton.jit
def _blend(value, other, factor):
    """Return factor * value + (1 - factor) * other in 0..255, rounded down, as torchvision's `_blend`."""
    scaled = (value.to(tl.float32) * factor).to(tl.float64)
    rest = (1.0 - factor.to(tl.float64)).to(tl.float32).to(tl.float64)
    mixed = (scaled + other.to(tl.float64) * rest).to(tl.float32)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit
def _tables(images, plans, tables, slot, slots, chains, share, pixels, block: tl.constexpr):
    """Write the table (256) of one channel of one image, if its operation is a table."""
    index, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = plans + ((index // chains) * (chains * slots + 1) + (index % chains) * slots + slot) * _WIDTH
    kind = tl.load(row).to(tl.int32)
    if (kind > 0) & (kind <= _LAST_TABLE):
        parameter = tl.load(row + 1)
        value = tl.arange(0, 256)
        image = images + (index // share) * pixels * 3
        result = value
        if kind == _BRIGHTNESS:
            result = tl.minimum(value.to(tl.float32) * parameter, 255.0).to(tl.int32)
        elif kind == _CONTRAST:
            total = tl.zeros((block,), tl.float32)
            for first in range(0, pixels, block):
                pixel = first + tl.arange(0, block)
                inside = pixel < pixels
                red = tl.load(image + pixel * 3, mask=inside, other=0)
                green = tl.load(image + pixel * 3 + 1, mask=inside, other=0)
                blue = tl.load(image + pixel * 3 + 2, mask=inside, other=0)
                total += _grey(red, green, blue)
            mean = tl.sum(total.to(tl.float64), 0) / pixels
            result = _blend(value, mean.to(tl.float32), parameter)
        elif kind == _POSTERIZE:
            shift = 8 - parameter.to(tl.int32)
            result = (value >> shift) << shift
        elif kind == _SOLARIZE:
            result = tl.where(value.to(tl.float32) >= parameter, 255 - value, value)
        elif kind == _SOLARIZE_ADD:
            result = tl.where(value < 128, value + parameter.to(tl.int32), value)
        else:
            counts = tl.zeros((256,), tl.int32)
            for first in range(0, pixels, block):
                pixel = first + tl.arange(0, block)
                seen = tl.load(image + pixel * 3 + channel, mask=pixel < pixels, other=0).to(tl.int32)
                counts += tl.histogram(seen, 256)
            counts -= tl.where(value == 0, tl.cdiv(pixels, block) * block - pixels, 0)  # what lies past the end
            present = counts > 0
            highest = tl.max(tl.where(present, value, 0), 0)
            if kind == _AUTOCONTRAST:
                lowest = tl.min(tl.where(present, value, 255), 0)
                scale = (highest - lowest).to(tl.float32) * (1.0 / 255)
                stretched = tl.math.div_rn((value - lowest).to(tl.float32), tl.where(highest > lowest, scale, 1.0))
                stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
                result = tl.where(highest > lowest, stretched, value)
            else:
                step = (pixels - tl.sum(tl.where(value == highest, counts, 0), 0)) // 255
                before = tl.cumsum(counts, 0) - counts
                spread = tl.minimum((before + step // 2) // tl.maximum(step, 1), 255)
                result = tl.where(step > 0, tl.where(value == 0, 0, spread), value)
        tl.store(tables + (index * 3 + channel) * 256 + value, result.to(tl.uint8))


@triton.jit
def _value(image, y, x, width, channel, inside, other):
    return tl.load(image + (y * width + x) * 3 + channel, mask=inside, other=other).to(tl.float32)


@triton.jit
def _sharpened(image, y, x, height, width, channel, inside, factor):
    """Return values that are sharper (or smoother: factor below 1) inside of a border of one pixel."""
    centre = _value(image, y, x, width, channel, inside, 0)
    inner = inside & (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    total = 4.0 * centre
    for down in tl.static_range(-1, 2):
        for right in tl.static_range(-1, 2):
            total += _value(image, y + down, x + right, width, channel, inner, 0)
    smooth = tl.floor(total / 13.0 + 0.5)
    mixed = centre + (smooth - centre) * (1.0 - factor)
    return tl.where(inner, tl.minimum(tl.maximum(mixed, 0.0), 255.0), centre).to(tl.int32)


@triton.jit
def _mirrored(position, size):
    position = tl.abs(position)
    return tl.where(position < size, position, 2 * size - 2 - position)


@triton.jit
def _blurred(image, y, x, height, width, channel, inside, sigma, along_rows: tl.constexpr):
    """Return values after a Gaussian filter along rows or columns, mirrored at the border."""
    total = tl.zeros_like(x).to(tl.float32)
    weights = 0.0
    for offset in tl.static_range(-_RADIUS, _RADIUS + 1):
        weight = tl.exp(-0.5 * offset * offset / (sigma * sigma))
        near_x = _mirrored(x + offset, width) if along_rows else x
        near_y = y if along_rows else _mirrored(y + offset, height)
        total += weight * _value(image, near_y, near_x, width, channel, inside, 0)
        weights += weight
    return tl.floor(total / weights + 0.5).to(tl.int32)


@triton.jit
def _turned(red, green, blue, channel, shift):
    """Return values of pixels whose hue is turned, as by torchvision's `adjust_hue`."""
    r, g, b = red / 255.0, green / 255.0, blue / 255.0
    high, low = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
    is_grey = high == low
    saturation = (high - low) / tl.where(is_grey, 1.0, high)
    spread = tl.where(is_grey, 1.0, high - low)
    rc, gc, bc = (high - r) / spread, (high - g) / spread, (high - b) / spread
    hue = tl.where(high == r, bc - gc, tl.where(high == g, 2.0 + rc - bc, 4.0 + gc - rc)) / 6.0 + shift
    # Each channel is the same function of the hue, a third of the circle apart.
    sector = (hue - channel * (1.0 / 3) + 1.0) * 6.0
    sector = sector - 6.0 * tl.floor(sector / 6.0)
    falling = tl.minimum(tl.maximum(sector - 1.0, 0.0), 1.0) - tl.minimum(tl.maximum(sector - 4.0, 0.0), 1.0)
    return (high * (1.0 - saturation * falling) * 255.999).to(tl.int32)  # 255.999 as in torchvision's `to_dtype`


@triton.jit
def _warped(image, row, y, x, height, width, channel, inside, outside, takes_nearest: tl.constexpr):
    """Return the input's values at the places that the row's matrix gives for each pixel."""
    right, down = x.to(tl.float32) - (width - 1) * 0.5, y.to(tl.float32) - (height - 1) * 0.5
    from_x = tl.load(row + 1) * right + tl.load(row + 2) * down + tl.load(row + 3) + (width - 1) * 0.5
    from_y = tl.load(row + 4) * right + tl.load(row + 5) * down + tl.load(row + 6) + (height - 1) * 0.5
    if takes_nearest:
        near_x, near_y = tl.floor(from_x + 0.5).to(tl.int32), tl.floor(from_y + 0.5).to(tl.int32)
        there = inside & (near_x >= 0) & (near_x < width) & (near_y >= 0) & (near_y < height)
        return _value(image, near_y, near_x, width, channel, there, outside).to(tl.int32)
    left, top = tl.floor(from_x), tl.floor(from_y)
    part_x, part_y = from_x - left, from_y - top
    total = tl.zeros_like(from_x)
    for below in tl.static_range(2):
        for beside in tl.static_range(2):
            near_x, near_y = left.to(tl.int32) + beside, top.to(tl.int32) + below
            there = inside & (near_x >= 0) & (near_x < width) & (near_y >= 0) & (near_y < height)
            weight = (part_x if beside else 1.0 - part_x) * (part_y if below else 1.0 - part_y)
            total += weight * _value(image, near_y, near_x, width, channel, there, outside)
    return tl.floor(total + 0.5).to(tl.int32)


@triton.jit
def _with_erased(values, row, y, x, channel, colour):
    top, left = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
    height, width = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    erased = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
    return tl.where(erased, (colour >> (8 * channel)) & 255, values)


@triton.jit
def _apply(
    images,
    results,
    plans,
    tables,
    slot,
    slots,
    chains,
    of_one,
    height,
    width,
    fill,
    colour,
    erases: tl.constexpr,
    takes_nearest: tl.constexpr,
    block: tl.constexpr,
):
    """Apply one operation to a block of values of one image, and erase its rectangle."""
    index = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < height * width * 3
    channel, pixel = place % 3, place // 3
    y, x = pixel // width, pixel % width
    plan = plans + (index // chains) * (chains * slots + 1) * _WIDTH
    row = plan + ((index % chains) * slots + slot) * _WIDTH
    kind = tl.where(slots > 0, tl.load(row), 0.0).to(tl.int32)
    parameter = tl.load(row + 1)
    image = images + (index // of_one) * height * width * 3
    if kind == _WARP:
        outside = (fill >> (8 * channel)) & 255
        values = _warped(image, row, y, x, height, width, channel, inside, outside, takes_nearest)
    elif kind == _SHARPNESS:
        values = _sharpened(image, y, x, height, width, channel, inside, parameter)
    elif kind == _BLUR_ROWS:
        values = _blurred(image, y, x, height, width, channel, inside, parameter, True)
    elif kind == _BLUR_COLUMNS:
        values = _blurred(image, y, x, height, width, channel, inside, parameter, False)
    elif (kind == _SATURATION) | (kind == _HUE):
        red = _value(image, y, x, width, 0, inside, 0)
        green = _value(image, y, x, width, 1, inside, 0)
        blue = _value(image, y, x, width, 2, inside, 0)
        if kind == _HUE:
            values = _turned(red, green, blue, channel, parameter)
        else:
            own = tl.where(channel == 0, red, tl.where(channel == 1, green, blue))
            values = _blend(own, _grey(red, green, blue), parameter)
    else:
        values = tl.load(image + place, mask=inside, other=0).to(tl.int32)
        if kind > 0:
            values = tl.load(tables + (index * 3 + channel) * 256 + values).to(tl.int32)
    if erases:
        values = _with_erased(values, plan + slots * _WIDTH, y, x, channel, colour)
    tl.store(results + index * height * width * 3 + place, values.to(tl.uint8), mask=inside)


@triton.jit
def _mix(
    images,
    ends,
    results,
    plans,
    slots,
    chains,
    height,
    width,
    colour,
    block: tl.constexpr,
):
    """Mix an image with the ends of its chains, as AugMix does, and erase its rectangle."""
    index, size = tl.program_id(1).to(tl.int64), height * width * 3
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < size
    row = plans + (index * (chains * slots + 1) + chains * slots) * _WIDTH
    total = tl.load(row + 4) * tl.load(images + index * size + place, mask=inside, other=0).to(tl.float32)
    for chain in range(chains):
        end = tl.load(ends + (index * chains + chain) * size + place, mask=inside, other=0)
        total += tl.load(row + 5 + chain) * end.to(tl.float32)
    values = tl.minimum(total, 255.0).to(tl.int32)
    values = _with_erased(values, row, place // 3 // width, place // 3 % width, place % 3, colour)
    tl.store(results + index * size + place, values.to(tl.uint8), mask=inside)
