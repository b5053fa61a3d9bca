"""Segmentation networks by name: those of torchvision, `tiny`, a small network for the built-in data, and factories."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from raydali.train.models.classification import check_known
from raydali.train.models.factories import build_by_factory, is_factory


def check_segmenter(name: str) -> None:
    """Check that the name is that of a segmentation network.

    Raises:
        UsageError: it is not. The message suggests similar names.
    """
    if not is_factory(name):
        known = torchvision.models.list_models(module=torchvision.models.segmentation)
        check_known(name, ["tiny", *known], "deeplabv3_resnet50")


def build(name: str, classes: int) -> nn.Module:
    """Build a segmentation network with random weights; those of torchvision that can have an auxiliary head have it.

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
    """Returns the scores of a segmentation model of torchvision, in training with those of its auxiliary head.

    Args:
        model: returns a mapping with "out", and perhaps "aux", or the scores themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Return scores (N, classes, H, W) of normalised images; in training a list of them, the main ones first."""
        found = self.model(images)
        if isinstance(found, torch.Tensor):
            found = {"out": found}
        scores = [found[head] for head in ("out", "aux") if head in found]
        return scores if self.training else scores[0]


class TinySegmenter(nn.Module):
    """A small network for the demo: features at a half to a 32nd of the size, joined at half the size."""

    def __init__(self, classes: int, widths: Sequence[int] = (16, 24, 48, 64, 64)) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_block(*each) for each in pairwise([3, *widths]))
        self.joined = nn.Conv2d(sum(widths), 32, 1)
        self.last = nn.Conv2d(32, classes, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores (N, classes, H, W) of images (N, 3, H, W)."""
        features, found = images, list[torch.Tensor]()
        for level in self.levels:
            features = level(features)
            found.append(features)
        parts = [_resized(part, found[0]) for part in found]
        return _resized(self.last(F.relu(self.joined(torch.cat(parts, 1)))), images)


def _resized(features: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.interpolate(features, like.shape[2:], mode="bilinear", align_corners=False)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, of which the first one halves height and width."""
    layers: list[nn.Module] = []
    for channels, stride in ((inputs, 2), (outputs, 1)):
        layers += [
            nn.Conv2d(channels, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)
