"""An update with wrong gradients that is undone leaves no trace, from the first update on."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from raydali.train.averaging import MovingAverage
from raydali.train.learning_rates import OptimizerName
from raydali.train.optim import build_optimizer
from raydali.train.precision import Precision
from raydali.train.update_backup import UpdateBackup, never_waits


def update(model: nn.Module, optimizer: Optimizer, average: MovingAverage, gradient: float) -> None:
    for index, weight in enumerate(model.parameters()):
        weight.grad = torch.full_like(weight, gradient + index) if weight.requires_grad else None
    optimizer.step()
    average.update_parameters(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wrong_at", [(0,), (2, 3)])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_an_undone_update_leaves_no_trace(name: OptimizerName, wrong_at: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(36, 2))
    model[0].bias.requires_grad_(False)
    results = []
    for disturbed in (False, True):
        weights = copy.deepcopy(model).to(device)
        optimizer = build_optimizer(name, weights, learning_rate=0.1, weight_decay=0.1)
        average, backup = MovingAverage(weights, 0.9, warmup=True), UpdateBackup()
        assert never_waits(optimizer, Precision("bf16", torch.device(device)).scaler)
        backup.restore()  # there is nothing to undo
        for step in range(5):
            if disturbed and step in wrong_at:
                backup.take(weights, optimizer, average)
                update(weights, optimizer, average, torch.nan)
                backup.restore()
            backup.take(weights, optimizer, average)
            update(weights, optimizer, average, step)
            backup.drop()
        results.append([weights.state_dict(), optimizer.state_dict()["state"], average.state_dict()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_what_may_wait_for_a_gpu_is_known() -> None:
    model = nn.Linear(2, 2)
    other = build_optimizer("lamb", model, learning_rate=0.1, weight_decay=0.1)
    assert not never_waits(other, Precision("bf16", torch.device("cpu")).scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not never_waits(optimizer, torch.GradScaler("cpu", enabled=True))
