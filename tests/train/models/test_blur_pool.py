"""BlurPool: which convolutions blur, and that the blur is FFCV's filter."""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50 as plain

from raydali.train.models.blur_pool import blur, resnet50


def test_convolutions_with_a_stride_blur_their_input_except_the_first_one() -> None:
    with torch.device("meta"):
        model, usual = resnet50(7), plain(num_classes=7)
    assert model.state_dict().keys() == usual.state_dict().keys()
    blurring: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module._forward_pre_hooks:
            blurring.append(name)
            assert module.stride == (2, 2)
    assert blurring == [f"layer{i}.0.{conv}" for i in (2, 3, 4) for conv in ("conv2", "downsample.0")]


def test_the_blur_is_the_filter_1_2_1() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 16, 9, 8)
    filter = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]).expand(16, 1, 3, 3) / 16
    torch.testing.assert_close(blur(images), F.conv2d(images, filter, padding=1, groups=16))


def test_a_convolution_gets_the_blurred_images() -> None:
    torch.manual_seed(0)
    conv = resnet50(7).get_submodule("layer2.0.downsample.0")
    assert isinstance(conv, nn.Conv2d)
    images = torch.randn(1, 256, 6, 6)
    torch.testing.assert_close(conv(images), F.conv2d(blur(images), conv.weight, stride=2))
