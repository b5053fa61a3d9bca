"""BlurPool: which convolutions blur, and that the blur is FFCV's filter."""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50 as plain

from raydali.train.models.blur_pool import BlurredConv2d, resnet50


def test_convolutions_with_a_stride_are_blurred_except_the_first_one() -> None:
    with torch.device("meta"):
        model, usual = resnet50(7), plain(num_classes=7)
    blurred = [name for name, module in model.named_modules() if isinstance(module, BlurredConv2d)]
    assert blurred == [f"layer{i}.0.{conv}" for i in (2, 3, 4) for conv in ("conv2", "downsample.0")]
    shapes = {name: tensor.shape for name, tensor in usual.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes


def test_the_blur_is_the_filter_1_2_1_before_the_convolution() -> None:
    torch.manual_seed(0)
    for kernel in (1, 3):
        conv = nn.Conv2d(16, 8, kernel, stride=2, padding=kernel // 2, bias=False)
        images = torch.randn(2, 16, 9, 9)
        filter = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).expand(16, 1, 3, 3) / 16
        expected = conv(F.conv2d(images, filter, padding=1, groups=16))
        torch.testing.assert_close(BlurredConv2d(conv)(images), expected)
