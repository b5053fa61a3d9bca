"""ResNet-50 with BlurPool (Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019), as FFCV has it.

    --model raydali.train.models.blur_pool:resnet50

timm's `resnetblur50` blurs elsewhere: between a convolution and its stride, and in place of max-pooling.
"""

import torch
from torch import nn
from torch.nn import functional as F

LEAST_CHANNELS = 16
"""Convolutions of fewer input channels, such as the first one, are not blurred."""


class BlurredConv2d(nn.Conv2d):
    """A convolution whose input is blurred by a filter [1 2 1] in both directions; its parameters keep their names."""

    filter: torch.Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        side = conv.kernel_size[0]
        super().__init__(conv.in_channels, conv.out_channels, side, conv.stride[0], padding=side // 2, bias=False)
        self.weight = conv.weight
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("filter", row.outer(row).expand(conv.in_channels, 1, 3, 3).clone(), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the convolution of the blurred images (N, C, H, W)."""
        return super().forward(F.conv2d(input, self.filter.to(input.dtype), padding=1, groups=self.in_channels))


def resnet50(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-50, of which each convolution with a stride blurs its input, except the first one."""
    from torchvision.models import resnet50 as build

    model: nn.Module = build(num_classes=num_classes)
    for module in [*model.modules()]:
        for name, conv in module.named_children():
            if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= LEAST_CHANNELS:
                setattr(module, name, BlurredConv2d(conv))
    return model
