"""Stochastic depth: probabilities of blocks as in torchvision and timm, names of parameters, and what is left out."""

import copy
from typing import Any

import pytest
import torch
import torchvision
from timm.layers.drop import DropPath
from torch import nn
from torchvision.ops import StochasticDepth

from raydali.errors import UsageError
from raydali.training.batchnorm import with_sync_batchnorm
from raydali.training.models.classification import build_model
from raydali.training.models.factories import set_drop_path
from tests.support.messages import mentioning


def probabilities(model: nn.Module) -> list[float]:
    """Those of the blocks, in order."""
    hooks: list[Any] = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    found: list[float] = [hook.keywords["probability"] for hook in hooks]
    for module in model.modules():
        if isinstance(module, StochasticDepth):
            found.append(module.p)
        if isinstance(module, DropPath):
            found.append(module.drop_prob or 0)
    return found


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t"])
def test_probabilities_are_torchvisions(name: str) -> None:
    builders: dict[str, Any] = {"convnext_tiny": torchvision.models.convnext_tiny, "swin_t": swin_t}
    with torch.device("meta"):
        model, expected = build_model(name, 2, drop_path=0.35), builders[name](stochastic_depth_prob=0.35)
    assert probabilities(model) == pytest.approx(probabilities(expected))
    assert max(probabilities(model)) == 0.35


def swin_t(stochastic_depth_prob: float) -> nn.Module:
    """The function of torchvision takes no probability, its class does."""
    model: nn.Module = torchvision.models.swin_transformer.SwinTransformer(
        [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=stochastic_depth_prob
    )
    return model


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_probabilities_of_resnets_are_timms(name: str) -> None:
    with torch.device("meta"):
        model, plain = build_model(name, 2, drop_path=0.05), build_model(name, 2)
        of_timm = build_model(f"timm:{name}", 2, drop_path=0.05)
    dropped = [p for p in probabilities(model) if p]
    assert dropped == pytest.approx([p for p in probabilities(of_timm) if p])
    assert dropped[-1] == 0.05
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_the_models_own_probability_is_the_default_and_0_switches_it_off() -> None:
    with torch.device("meta"):
        assert max(probabilities(build_model("convnext_tiny", 2))) == 0.1
        assert set(probabilities(build_model("convnext_tiny", 2, drop_path=0.0))) == {0.0}
        assert not probabilities(build_model("resnet18", 2))


@pytest.mark.parametrize("name", ["mobilenet_v2", "digits", "timm:vgg11", "torchvision.models:vgg11"])
def test_models_without_stochastic_depth_are_refused(name: str) -> None:
    with torch.device("meta"), pytest.raises(UsageError, match=mentioning(f"--model {name} --drop-path resnet50")):
        build_model(name, 2, drop_path=0.1)


def test_a_factory_may_make_a_model_that_has_it() -> None:
    with torch.device("meta"):
        model = build_model("torchvision.models:resnet18", 2, drop_path=0.2)
    assert max(probabilities(model)) == 0.2


class Steps(nn.Module):
    """Two residual blocks, whose branches give their input."""

    def __init__(self) -> None:
        super().__init__()
        block = torchvision.models.resnet.BasicBlock
        self.blocks = nn.Sequential(block(4, 4), block(4, 4))
        for each in self.blocks:
            assert isinstance(each, block)
            for convolution in (each.conv1, each.conv2):
                nn.init.dirac_(convolution.weight)
            for norm in (each.bn1, each.bn2):
                norm.momentum = 0.0
                norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(x)
        return output


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_sample_skips_a_branch_or_gets_it_scaled(synchronized: bool) -> None:
    model = Steps()
    set_drop_path(model, 0.5)
    if synchronized:
        model = with_sync_batchnorm(model, None)  # type: ignore[assignment]
    model = copy.deepcopy(model)  # as a moving average is
    images = torch.ones(400, 4, 2, 2)
    last = model.blocks[1].bn2
    assert isinstance(last, nn.Module)
    torch.testing.assert_close(model(images), 4 * images, rtol=1e-3, atol=0)  # norms in evaluation mode
    last.training = True
    last.forward = lambda x: x
    torch.manual_seed(0)
    outputs = model(images)[:, 0, 0, 0]
    skipped = torch.isclose(outputs, torch.tensor(2.0), rtol=1e-3)
    assert torch.isclose(outputs, torch.tensor(6.0), rtol=1e-3).logical_or(skipped).all()
    assert 150 < skipped.sum() < 250
    torch.manual_seed(0)
    torch.testing.assert_close(model(images)[:, 0, 0, 0], outputs)


@pytest.mark.slow
def test_it_compiles_as_one_graph() -> None:
    model = build_model("resnet18", 2, drop_path=0.5)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    images = torch.randn(4, 3, 32, 32)
    torch.manual_seed(0)
    expected = model(images)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(images), expected)
