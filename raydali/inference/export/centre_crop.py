"""Resizing and cropping as plain arithmetic, which every exporter takes, for images of any size.

    images (N, 3, H, W) --> columns of the crop --> rows of the crop --> (N, 3, side, side)
                       x (W, side)             (side, H) x

Each of both steps is a product with a matrix of the filter's weights, which are computed from H and W alone. As by
torch's kernel for 8-bit images, the filter is widened where images shrink (antialiasing), it is cut off at the border,
and the result of each step is rounded to 8 bits. Only the crop is computed, however long the image is.
"""

import torch
from torch import nn

from raydali.data.tasks.pipeline import Interpolation

TIE = 2**-13
"""Levels by which ties are raised: they are rounded up, as by that kernel, in whatever order floats are added."""


class CentreCrop(nn.Module):
    """The centre of images whose shorter side is resized: Resize and CenterCrop of torchvision, for Pillow's images.

    Args:
        shorter_side: length of the resized shorter side, in pixels.
        side: height and width of the crop, at most that.
        interpolation: the filter.
    """

    def __init__(self, shorter_side: int, side: int, interpolation: Interpolation) -> None:
        super().__init__()
        self.shorter_side, self.side, self.interpolation = shorter_side, side, interpolation

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the crops (..., side, side) of images (..., H, W) in 0..255: float32, whole numbers in 0..255."""
        # As tensors, since a condition on the sizes would become one of the exported model.
        height, width = (torch.scalar_tensor(size, dtype=torch.int64) for size in images.shape[-2:])
        shorter = torch.minimum(height, width)
        columns = self._weights(width, torch.arange(images.shape[-1]), shorter)
        rows = self._weights(height, torch.arange(images.shape[-2]), shorter)
        return _in_8_bits(rows @ _in_8_bits(images.to(torch.float32) @ columns.T))

    def _weights(self, length: torch.Tensor, pixels: torch.Tensor, shorter: torch.Tensor) -> torch.Tensor:
        """Return the weights (side, length) of the pixels of a row or a column in each pixel of the crop."""
        resized = self.shorter_side * length // shorter
        margin = resized - self.side
        places = (margin + margin // 2 % 2) // 2 + torch.arange(self.side)  # half of it, rounded to even
        # Distances of the pixels' centres in units of the filter: whole numbers up to this division.
        distances = (2 * pixels + 1) * resized - (2 * places[:, None] + 1) * length
        x = (distances.to(torch.float32) / (2 * torch.maximum(length, resized)).to(torch.float32)).abs()
        if self.interpolation == "bilinear":
            weights = (1 - x).clamp(min=0)
        else:  # Keys' cubic convolution, with a = -0.5 as in Pillow
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
        return weights / weights.sum(1, keepdim=True)


def _in_8_bits(levels: torch.Tensor) -> torch.Tensor:
    return (levels + (0.5 + TIE)).floor().clamp(0, 255)
