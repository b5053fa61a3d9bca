"""Networks that are built without weights: all but the values of their parameters is as usual, and nothing is drawn."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

from jobs import imagenet
from raydali.training.models.classification import build_model
from raydali.training.weights.undrawn import undrawn
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank
from tests.support.ranks import Stopped, folder_of


def detector() -> nn.Module:
    model: nn.Module = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    return model


def draws(build: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
    """Return what a function builds, and whether it draws random numbers."""
    before = torch.get_rng_state()
    return build(), not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "build",
    [
        lambda: timm.create_model("vit_tiny_patch16_224"),
        lambda: build_model("digits", 10, 32),
        detector,
    ],
)
def test_only_the_weights_are_missing(build: Callable[[], nn.Module]) -> None:
    network, drew = draws(lambda: undrawn(build))
    usual, draws_usually = draws(build)
    assert draws_usually and not drew
    facts = [
        [(name, each.shape, each.dtype, each.requires_grad) for name, each in model.named_parameters()]
        for model in (network, usual)
    ]
    assert facts[0] == facts[1]
    for buffer, expected in zip(network.buffers(), usual.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    assert network.load_state_dict(usual.state_dict())
    for weight, expected in zip(network.parameters(), usual.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_a_network_that_needs_its_weights_gets_them() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        nn.init.constant_(layer.weight, 7.0)
        if not torch.equal(layer.weight, torch.full((3, 3), 7.0)):
            raise ValueError("no sevens")
        return layer

    assert torch.equal(undrawn(build).get_parameter("weight"), torch.full((3, 3), 7.0))


def test_buffers_that_no_state_has_are_drawn_as_usual() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        layer.register_buffer("noise", torch.randn(3), persistent=False)
        return layer

    assert torch.equal(undrawn(build).get_buffer("noise"), build().get_buffer("noise"))


def test_a_resume_draws_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, build = list[bool](), imagenet.build_model

    def observed(*arguments: object) -> nn.Module:
        model, drew = draws(lambda: build(*arguments))  # type: ignore[arg-type]
        found.append(drew)
        return model

    monkeypatch.setattr(imagenet, "build_model", observed)
    data, run = few_digits(tmp_path / "digits"), folder_of(tmp_path, "run")
    with suppress(Stopped):
        train_rank(imagenet.train, SHORT, data, run, 8)
    train_rank(imagenet.train, SHORT, data, run)
    assert found == [True, False]
