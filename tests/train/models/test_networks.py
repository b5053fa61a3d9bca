"""Networks for small images: published numbers of parameters, shapes, gradients, and stochastic depth."""

import pytest
import torch

from raydali.train.models.classification import build_model, check_model, head_names
from raydali.train.models.small_images import SMALL_IMAGE_MODELS

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


@pytest.mark.parametrize("name", SMALL_IMAGE_MODELS)
@pytest.mark.parametrize("size", [28, 32])
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


@pytest.mark.parametrize("name", ["resnet9", "wrn40_4"])
def test_they_compile_as_one_graph(name: str) -> None:
    model = build_model(name, 10, drop_path=0.5)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 28, 28)
    torch.manual_seed(0)
    expected = model(images)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(images), expected)
