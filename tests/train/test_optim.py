"""Learning rates and parameter groups."""

import pytest
import torch
from torch import nn

from raydali.train.optim import build_optimizer, learning_rate, load_optimizer, parameter_groups, set_learning_rate


def test_warm_up_then_half_a_cosine() -> None:
    rates = [learning_rate(progress / 1000, peak=0.4, warmup=0.1) for progress in range(1001)]
    assert rates[0] == 0
    assert max(rates) == rates[100] == 0.4
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert abs(rates[550] - 0.2) < 1e-12
    assert abs(rates[-1]) < 1e-12


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0.0, peak=0.4, warmup=0.0) == 0.4


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    decaying, others = parameter_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {p.shape for p in decaying["params"]} == {torch.Size([8, 3, 3, 3]), torch.Size([2, 8])}
    assert len(others["params"]) == 4


def test_each_scale_has_its_groups_and_its_rate() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    scales = {name: 0.5 if name.startswith(("0.", "1.")) else 10.0 for name, _ in model.named_parameters()}
    optimizer = build_optimizer("adamw", model, learning_rate=0.1, weight_decay=0.2, scales=scales)
    set_learning_rate(optimizer, 0.01)
    groups = [(g["lr_scale"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert groups == [(0.5, 0.005, 0.0, 3), (10.0, 0.1, 0.2, 1), (10.0, 0.1, 0.0, 1)]


def test_without_scales_the_groups_are_those_of_old_checkpoints() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Linear(8, 2))
    optimizer = build_optimizer("sgd", model, learning_rate=0.1, weight_decay=0.2)
    set_learning_rate(optimizer, 0.01)
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.01, 1), (0.01, 3)]
    assert all("lr_scale" not in group for group in optimizer.param_groups)


def test_a_resume_takes_momenta_but_not_settings() -> None:
    model = nn.Linear(2, 2)
    before = torch.optim.SGD(parameter_groups(model, 0.5), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    before.step()
    after = torch.optim.SGD(parameter_groups(model, 0.25), lr=0.2, momentum=0.8)
    load_optimizer(after, before.state_dict())
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in after.param_groups] == [
        (0.2, 0.8, 0.25),
        (0.2, 0.8, 0.0),
    ]
    torch.testing.assert_close(after.state[model.weight], before.state[model.weight])


@pytest.mark.parametrize(("device", "there"), [("meta", True), ("cpu", False)])
def test_adams_step_lies_where_the_optimizer_of_now_wants_it(device: str, there: bool) -> None:
    """Fused kernels, which only GPUs have here, take it on their device; torch itself goes by the checkpoint."""
    on_other = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=not there)
    on_other.param_groups[0]["params"][0].grad = torch.ones(2)
    on_other.step()
    parameter = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([parameter], fused=there)
    load_optimizer(optimizer, on_other.state_dict())
    assert optimizer.param_groups[0]["fused"] is there
    assert optimizer.state[parameter]["step"].device.type == device
