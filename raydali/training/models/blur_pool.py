"""ResNet-50 with BlurPool (Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019), as FFCV has it.

    --model raydali.training.models.blur_pool:resnet50

timm's `resnetblur50` blurs elsewhere: between a convolution and its stride, and in place of max-pooling.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LEAST_CHANNELS = 16
"""Convolutions of fewer input channels, such as the first one, are not blurred."""


def resnet50(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-50, whose convolutions with a stride, except the first one, blur their input."""
    from torchvision.models import resnet50 as build

    model: nn.Module = build(num_classes=num_classes)
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= LEAST_CHANNELS:
            conv.register_forward_pre_hook(_blur_input)
    return model


def _blur_input(_conv: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
    return blur(inputs[0])


def blur(images: torch.Tensor) -> torch.Tensor:
    """Filter images (N, C, H, W) by [1 2 1] / 4 in both directions, with zeros around: twice a mean of 2x2 pixels."""
    return F.avg_pool2d(F.avg_pool2d(images, 2, stride=1, padding=1), 2, stride=1)
