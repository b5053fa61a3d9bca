"""The first convolution of many networks, 7 x 7 of three channels with a stride of 2, in a form for tensor cores.

Tensor cores multiply 8 or 16 channels at a time, so that cuDNN pads the three channels of images with zeros, and uses
a slow kernel. With squares of 2 x 2 pixels as one pixel of 12 channels (space to depth), a convolution of 4 x 4 with
a stride of 1 gives the same sums in another order. A fourth channel of zeros in each image makes 16 channels of 12.

These are functions of PyTorch: torch.compile does all in the kernel that normalises the images, and gradients go back
to the weight as it is in the model and in its checkpoints.
"""

import torch
from torch.nn import functional

from raydali.train.fused.operators import INTERPRETED

SETTINGS = (2, 2), (3, 3), (1, 1), 1
"""Stride, padding, dilation and groups of the convolution."""


def convolution(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return a convolution with SETTINGS, in the form for tensor cores if these compute it.

    A gradient of the images is not computed in this form, since it would be slow.

    Args:
        images: (N, C, H, W).
        weight: (K, C, height, width).
        bias: (K).
    """
    is_half = images.dtype.itemsize == 2 or torch.is_autocast_enabled(images.device.type)
    on_tensor_cores = is_half and (images.is_cuda or INTERPRETED)
    if not on_tensor_cores or images.dim() != 4 or weight.shape[1:] != (3, 7, 7) or images.requires_grad:
        return functional.conv2d(images, weight, bias, *SETTINGS)
    height, width = images.shape[2:]
    # The centre of the window is at 4 of 8; the last window ends 3 or 2 pixels after the last pixel.
    return functional.conv2d(_squares(images, 4, 2 + height % 2, 2 + width % 2), _squares(weight, 1, 0, 0), bias)


def _squares(images: torch.Tensor, before: int, below: int, right: int) -> torch.Tensor:
    """Return squares of 2 x 2 pixels of three channels as pixels of 16 channels, after padding with zeros."""
    padded = functional.pad(images, (before, right, before, below, 0, 1))
    squares: torch.Tensor = padded.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
    return squares.contiguous(memory_format=torch.channels_last)


_LIBRARY = torch.library.Library("raydali", "FRAGMENT")
_LIBRARY.define("stem_convolution" + torch.library.infer_schema(convolution, mutates_args=()))
_LIBRARY.impl("stem_convolution", convolution, "CompositeImplicitAutograd")
