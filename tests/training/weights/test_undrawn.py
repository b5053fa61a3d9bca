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
from raydali.training.weights.undrawn import Undrawn
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank
from tests.support.ranks import Stopped, folder_of


def detector() -> nn.Module:
    model: nn.Module = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    return model


def draws(build: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
    """What it builds, and whether it draws random numbers."""
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
    with Undrawn():
        undrawn, drew = draws(build)
    usual, draws_usually = draws(build)
    assert draws_usually and not drew
    facts = [
        [(name, each.shape, each.dtype, each.requires_grad) for name, each in model.named_parameters()]
        for model in (undrawn, usual)
    ]
    assert facts[0] == facts[1]
    for buffer, expected in zip(undrawn.buffers(), usual.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    assert undrawn.load_state_dict(usual.state_dict())
    for weight, expected in zip(undrawn.parameters(), usual.parameters(), strict=True):
        assert torch.equal(weight, expected)


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
