"""Resizing of a batch of decoded images of one size, on any device, each from a window of its own.

Rows and columns are two matrix products with the weights of Pillow's antialiased filters, and pixels are rounded to 8
bits after each, as Pillow does (Pillow's Resample.c). Results are Pillow's to within 1 of 255.
"""

import torch

from raydali.data.tasks.pipeline import Interpolation


def resized(
    images: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    shape: tuple[int, int],
    mode: Interpolation,
    *,
    centre: int | None = None,
) -> torch.Tensor:
    """Return the windows of images, resized, without waiting for the device.

    Args:
        images: (N, C, H, W) uint8.
        starts: y before x of each window in pixels, (N, 2) or (1, 2), on the host.
        sizes: height before width of each, likewise.
        shape: height and width of a resized window.
        mode: the filter.
        centre: height and width of the centre that is returned; None: the whole.

    Returns:
        uint8, in channels-last memory.
    """
    shown = shape if centre is None else (centre, centre)
    if images.shape[2:] == shape == shown and (sizes == torch.tensor(shape)).all():
        return images
    starts, sizes = (each.to(images.device, torch.float32, non_blocking=True) for each in (starts, sizes))
    pixels = images.to(torch.float32, memory_format=torch.contiguous_format)
    rows, columns = (
        _weights(starts[:, axis], sizes[:, axis], images.shape[2 + axis], shape[axis], shown[axis], mode)
        for axis in (0, 1)
    )
    pixels = _rounded(pixels @ columns[:, None].mT)
    return _rounded(rows[:, None] @ pixels).to(torch.uint8, memory_format=torch.channels_last)


def _rounded(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels + 0.5).floor_().clamp_(0, 255)


def _weights(
    start: torch.Tensor, size: torch.Tensor, inputs: int, outputs: int, shown: int, mode: Interpolation
) -> torch.Tensor:
    """Return the weights (N, shown, inputs) of pixels along one axis, for windows (N,) of it."""
    first = round((outputs - shown) / 2)
    start, size = start[:, None, None], size[:, None, None]
    scale = size / outputs
    middles = (torch.arange(first, first + shown, device=start.device)[:, None] + 0.5) * scale
    places = torch.arange(inputs, device=start.device) + 0.5 - start
    distances = ((places - middles) / scale.clamp(min=1)).abs()
    weights = _kernel(distances, mode) * ((places > 0) & (places < size))
    return weights / weights.sum(-1, keepdim=True)


def _kernel(distance: torch.Tensor, mode: Interpolation) -> torch.Tensor:
    if mode == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))
