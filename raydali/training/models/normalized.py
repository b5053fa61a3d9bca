"""A module around a model: normalisation of 8-bit images, which torch.compile can fuse with it.

Its state in checkpoints is the model's state.
"""

import torch
from torch import nn

from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

Channels = tuple[float, ...]


class Normalized(nn.Module):
    """A model that normalises images in 0..255 first.

    Args:
        model: the inner model, whose inputs are float images (N, C, ...).
        mean, std: mean and standard deviation of each channel, in units of the full range. Default: ImageNet's.
        mirrored: in evaluation mode, average the outputs of each image and of its mirror image (`--tta flip`).
    """

    def __init__(
        self, model: nn.Module, mean: Channels | None = None, std: Channels | None = None, *, mirrored: bool = False
    ) -> None:
        super().__init__()
        self.mirrored = mirrored
        self.scale: torch.Tensor
        self.shift: torch.Tensor
        self.model = model
        means, deviations = torch.tensor(mean or IMAGENET_MEAN), torch.tensor(std or IMAGENET_STD)
        self.register_buffer("scale", 1 / (255 * deviations), persistent=False)
        self.register_buffer("shift", -means / deviations, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the output of the model for images (N, C, ...) in 0..255, of any dtype."""
        normalised = self._normalise(images)
        output: torch.Tensor = self.model(normalised)
        if self.mirrored and not self.training:
            output = (output + self.model(normalised.flip(-1))) / 2
        return output

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.movedim(1, -1)
        if images.is_cpu and images.dtype == torch.uint8 and rows.is_contiguous() and not torch.compiler.is_compiling():
            # Half the time: the CPU takes colours in memory one by one, but a whole row at once.
            columns = images.shape[-1]
            floats = rows.flatten(-2).to(self.scale.dtype)
            floats.mul_(self.scale.repeat(columns)).add_(self.shift.repeat(columns))
            return floats.view(rows.shape).movedim(-1, 1)
        shape = (-1, *[1] * (images.dim() - 2))
        return (images * self.scale.view(shape)).add_(self.shift.view(shape))
