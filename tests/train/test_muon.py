"""Muon: which parameters it takes, and its updates against torch's own."""

from typing import Any

import pytest
import torch
from torch import nn

from raydali.train.models.classification import build_model, head_names
from raydali.train.models.small_images import digits_network
from raydali.train.optim import build_optimizer, hidden_matrices
from tests.support.torch_muon import ComparedMuon


@pytest.mark.parametrize("kernel_size", [3, 1])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_convolutions_as_matrices_and_leaves_the_rest_to_adamw(
    memory_format: torch.memory_format, kernel_size: int
) -> None:
    """Against torch's own Muon on linear layers with the same weights, and its AdamW."""
    torch.manual_seed(0)
    convolution, norm, head = nn.Conv2d(3, 8, kernel_size), nn.BatchNorm2d(8), nn.Linear(8, 2)
    model = nn.Sequential(convolution, norm, head).to(memory_format=memory_format)
    options: dict[str, Any] = {"momentum": 0.8, "nesterov": True}
    optimizer = build_optimizer("muon", model, learning_rate=0.01, weight_decay=0.1, head={"2.weight"}, **options)
    matrix = nn.Parameter(convolution.weight.detach().flatten(1).clone())
    muon = torch.optim.Muon([matrix], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **options)
    others = [nn.Parameter(each.detach().clone()) for each in (head.weight, head.bias, norm.weight)]
    decays = zip(others, (0.1, 0.0, 0.0), strict=True)
    adamw = torch.optim.AdamW([{"params": [each], "weight_decay": decay} for each, decay in decays], lr=0.01)
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in (matrix, *others)]
        matrix.grad, convolution.weight.grad = gradients[0], gradients[0].view_as(convolution.weight)
        for parameter, other, gradient in zip(
            (head.weight, head.bias, norm.weight), others, gradients[1:], strict=True
        ):
            parameter.grad = other.grad = gradient
        for each in (optimizer, muon, adamw):
            each.step()
    assert convolution.weight.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(convolution.weight.flatten(1), matrix)
    for parameter, other in zip((head.weight, head.bias, norm.weight), others, strict=True):
        torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("resnet18", {"fc.weight"}),
        ("vit_b_32", {"encoder.pos_embedding", "heads.head.weight"}),
        ("convnext_tiny", {"classifier.2.weight"}),
    ],
)
def test_muon_takes_weights_of_hidden_layers(name: str, left_out: set[str]) -> None:
    with torch.device("meta"):
        model = build_model(name, 10)
    matrices = hidden_matrices(model, head_names(lambda classes: build_model(name, classes), 10))
    others = {
        name: p.shape for name, p in model.named_parameters() if p not in matrices and sum(n > 1 for n in p.shape) > 1
    }
    depthwise = {name for name, shape in others.items() if len(shape) == 4 and shape[1] == 1}
    assert others.keys() - depthwise == left_out
    assert bool(depthwise) is (name == "convnext_tiny")


@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_updates_are_torchs_at_any_rate_and_after_loading_momenta(keeps_gradients: bool) -> None:
    torch.manual_seed(0)
    model = digits_network(10).to(memory_format=torch.channels_last)
    compared = ComparedMuon(model, keeps_gradients=keeps_gradients)
    for step in range(8):
        compared.step(0.01 / (step + 1), seed=step)
        if step == 3:
            addresses = compared.addresses()
            compared.reload()
            assert compared.addresses() != addresses
    compared.check()
    assert compared.addresses() == addresses  # a CUDA graph has captured them


def test_momenta_begin_again_if_there_are_none_to_load() -> None:
    torch.manual_seed(0)
    model = digits_network(10)
    compared = ComparedMuon(model, keeps_gradients=True)
    compared.step(0.0, seed=1)
    compared.optimizer.state.clear()
    compared.torchs.state.clear()
    compared.step(0.01, seed=2)
    compared.check()
