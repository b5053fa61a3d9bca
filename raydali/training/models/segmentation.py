"""Segmentation networks by name: torchvision's, `tiny`, a small network for the built-in data, and factories."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from raydali.training.models.classification import check_known
from raydali.training.models.factories import build_by_factory, is_factory
from raydali.training.models.small_images import convolution


def check_segmenter(name: str) -> None:
    """Check that the name stands for a segmentation network.

    Raises:
        UsageError: it is not. The message suggests similar names.
    """
    if not is_factory(name):
        models = torchvision.models.list_models(module=torchvision.models.segmentation)
        check_known(name, ["tiny", *models], "deeplabv3_resnet50")


def build(name: str, classes: int) -> nn.Module:
    """Build a segmentation network with random weights; torchvision's networks that can have an auxiliary head have it.

    Args:
        name: `tiny`, a name of torchvision, or `package.module:factory`, which is called with the number of classes.
        classes: their number.

    Raises:
        UsageError: there is no such factory, or it fails.
    """
    if name == "tiny":
        return TinySegmenter(classes)
    if is_factory(name):
        return build_by_factory(name, classes, 0)
    options: dict[str, Any] = {} if name.startswith("lraspp") else {"aux_loss": True}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=classes, **options
    )
    return model


class WithAuxiliary(nn.Module):
    """Returns the scores of a segmentation model of torchvision, in training with its auxiliary head's scores.

    Args:
        model: returns a mapping with "out", and perhaps "aux", or the scores themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Return scores (N, classes, H, W) of normalised images; in training a list of them, the main ones first."""
        outputs = self.model(images)
        if isinstance(outputs, torch.Tensor):
            outputs = {"out": outputs}
        scores = [outputs[head] for head in ("out", "aux") if head in outputs]
        return scores if self.training else scores[0]


class TinySegmenter(nn.Module):
    """A small network for the demo: features at a half to a 16th of the size, joined from the smallest to a quarter."""

    def __init__(self, classes: int, widths: Sequence[int] = (16, 32, 64, 64), joined: int = 32) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_block(*channels) for channels in pairwise([3, *widths]))
        self.lateral = nn.ModuleList(nn.Conv2d(width, joined, 1) for width in widths[1:])
        self.smooth = nn.ModuleList(convolution(joined, joined) for _ in widths[2:])
        self.last = nn.Conv2d(joined, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (N, classes, H, W) of images (N, 3, H, W)."""
        features = self.levels[0](images)
        levels = [features := level(features) for level in self.levels[1:]]
        *larger, top = (lateral(level) for lateral, level in zip(self.lateral, levels, strict=True))
        for smooth, level in zip(self.smooth, reversed(larger), strict=True):
            top = smooth(_resized(top, level) + level)
        return _resized(self.last(top), images)


def _resized(features: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.interpolate(features, like.shape[2:], mode="bilinear", align_corners=False)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, of which the first one halves height and width."""
    return nn.Sequential(convolution(inputs, outputs, stride=2), convolution(outputs, outputs))
