"""Networks for images of about 28 to 64 pixels, whose first layers do not make them smaller, and for small clips.

| name             | model                                                  | parameters, 10 classes |
|------------------|--------------------------------------------------------|------------------------|
| `digits`         | three convolutions, for the built-in data              |     94,762             |
| `clips`          | three convolutions in space and time, for the same     |     71,290             |
| `resnet9`        | Page's network of DAWNBench's CIFAR-10 records         |  6,573,120             |
| `resnet18_small` | ResNet-18 with a first convolution of 3x3 and stride 1 | 11,173,962             |
| `wrn40_4`        | Wide ResNet 40-4                                       |  8,949,210             |
| `wrn16_8`        | Wide ResNet 16-8                                       | 10,961,370             |
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


def digits_network(classes: int) -> nn.Sequential:
    """Return a network of three convolutions with BatchNorm: 94,000 parameters, and epochs of seconds on one core."""
    layers = (convolution(*widths, stride=2) for widths in ((3, 32), (32, 64), (64, 128)))
    return nn.Sequential(*(layer for block in layers for layer in block), *_averaging_head(128, classes))


def clips_network(classes: int) -> nn.Sequential:
    """Return a network of three space-time convolutions: 71,000 parameters, and epochs of seconds on one core."""

    def block(inputs: int, outputs: int, stride: tuple[int, int, int]) -> list[nn.Module]:
        convolution = nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]

    layers = block(3, 16, (1, 4, 4)) + block(16, 32, (1, 2, 2)) + block(32, 64, (2, 2, 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet9(classes: int) -> nn.Sequential:
    """Return the network of "How to train your ResNet" (Page, 2018), for images of at least 8x8 pixels."""
    return nn.Sequential(
        convolution(3, 64),
        convolution(64, 128).append(nn.MaxPool2d(2)),
        _Residual(convolution(128, 128).extend(convolution(128, 128))),
        convolution(128, 256).append(nn.MaxPool2d(2)),
        convolution(256, 512).append(nn.MaxPool2d(2)),
        _Residual(convolution(512, 512).extend(convolution(512, 512))),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes, bias=False),
        _Scale(0.125),
    )


def resnet18_small(classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 without its first subsampling by 4, as it is usual for CIFAR."""
    import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=classes)
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = first, nn.Identity()
    return model


def wide_resnet(classes: int, *, depth: int, width: int) -> nn.Sequential:
    """Return a Wide ResNet (Zagoruyko & Komodakis, BMVC 2016), without dropout.

    Args:
        classes: number of classes.
        depth: 4 more than a multiple of 6: 3 groups of (depth - 4) / 6 blocks.
        width: factor of the channels 16, 32 and 64 of the groups.
    """
    blocks, inputs = list[nn.Module](), 16
    for group, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for index in range((depth - 4) // 6):
            blocks.append(_WideBlock(inputs, outputs, stride=2 if group and not index else 1))
            inputs = outputs
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        *blocks,
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        *_averaging_head(inputs, classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


SMALL_IMAGE_MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "digits": digits_network,
    "resnet9": resnet9,
    "resnet18_small": resnet18_small,
    "wrn40_4": partial(wide_resnet, depth=40, width=4),
    "wrn16_8": partial(wide_resnet, depth=16, width=8),
}
"""What makes each model of a number of classes, by name."""


def convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """Return a convolution of 3x3 pixels with BatchNorm and ReLU."""
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _averaging_head(inputs: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)


class _Residual(nn.Module):
    """Adds its input to the output of a branch, which --drop-path leaves out."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        from torchvision.ops import StochasticDepth  # takes seconds

        self.branch, self.drop_path = branch, StochasticDepth(0.0, "row")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.drop_path(self.branch(x))
        return output


class _WideBlock(_Residual):
    """A pre-activated residual block of two convolutions; a projection of its shortcut takes the activated input."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            )
        )
        self.norm = nn.BatchNorm2d(inputs)
        self.projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated = F.relu(self.norm(x))
        shortcut = x if self.projection is None else self.projection(activated)
        output: torch.Tensor = shortcut + self.drop_path(self.branch(activated))
        return output


class _Scale(nn.Module):
    """Multiplies logits, so that training begins with even classes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor
