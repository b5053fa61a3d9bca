"""Networks of our own: published numbers of parameters, shapes, gradients, stochastic depth, and what they blur."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50 as plain
from torchvision.transforms.v2.functional import normalize, to_dtype

from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.training.models.blur_pool import blur, resnet50
from raydali.training.models.classification import build_model, check_model, head_names
from raydali.training.models.normalized import Normalized
from raydali.training.models.small_images import SMALL_IMAGE_MODELS
from tests.support.quick import first_quick

PARAMETERS = {
    "digits": 94_762,
    "resnet9": 6_573_120,
    "resnet18_small": 11_173_962,
    "wrn40_4": 8_949_210,
    "wrn16_8": 10_961_370,
}


@pytest.mark.parametrize("name", SMALL_IMAGE_MODELS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build_model(name, 10).parameters()) == PARAMETERS[name]
    head = head_names(lambda classes: build_model(name, classes), 10)
    assert {each.rpartition(".")[2] for each in head} <= {"weight", "bias"}
    assert len({each.rpartition(".")[0] for each in head}) == 1


@first_quick("name", SMALL_IMAGE_MODELS)
@first_quick("size", [28, 32])
def test_every_parameter_gets_a_gradient(name: str, size: int) -> None:
    check_model(name, size)
    torch.manual_seed(0)
    model = build_model(name, 10).to(memory_format=torch.channels_last)
    model(torch.randn(2, 3, size, size)).logsumexp(1).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


@pytest.mark.parametrize("name", ["resnet18_small", "wrn40_4"])
def test_they_subsample_by_4_or_8_in_the_end(name: str) -> None:
    model, sides = build_model(name, 10).eval(), set[int]()
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, output: sides.add(output.shape[-1]))
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert sides == {32, 16, 8, *([4] if name == "resnet18_small" else [])}


@pytest.mark.parametrize(("name", "blocks"), [("resnet9", 2), ("wrn40_4", 18)])
def test_stochastic_depth_rises_linearly(name: str, blocks: int) -> None:
    from torchvision.ops import StochasticDepth

    with torch.device("meta"):
        model = build_model(name, 10, drop_path=0.2)
    found = [module.p for module in model.modules() if isinstance(module, StochasticDepth)]
    assert found == pytest.approx([0.2 * index / (blocks - 1) for index in range(blocks)])


@pytest.mark.parametrize("name", ["resnet9", pytest.param("wrn40_4", marks=pytest.mark.slow)])
def test_they_compile_as_one_graph(name: str) -> None:
    model = build_model(name, 10, drop_path=0.5)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 28, 28)
    torch.manual_seed(0)
    expected = model(images)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(images), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation


def test_it_is_torchvisions() -> None:
    images = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8)
    expected = normalize(to_dtype(images, torch.float32, scale=True), list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(Normalized(nn.Identity())(images), expected)
    torch.testing.assert_close(Normalized(nn.Identity())(images.float()), expected)


def test_other_means_and_deviations_of_clips_with_one_channel() -> None:
    clips = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 3, 1, 1)
    normalized = Normalized(nn.Identity(), mean=(0.2,), std=(0.5,))(clips)
    torch.testing.assert_close(normalized.flatten(), torch.tensor([-0.4, 0.0, 1.6]))


def test_a_checkpoint_holds_the_models_state_alone() -> None:
    model = nn.Conv2d(3, 4, 1)
    assert Normalized(model).state_dict().keys() == {f"model.{name}" for name in model.state_dict()}


# ---------------------------------------------------------------------------------------------------------------------
# BlurPool


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
