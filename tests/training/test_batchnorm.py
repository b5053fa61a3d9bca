"""BatchNorm's running statistics over micro-batches and ranks, against the definition."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch import nn

from raydali.training.batchnorm import RunningStatistics, with_sync_batchnorm
from raydali.training.worker import Worker
from tests.support.ranks import run_ranks

MICRO_BATCHES, STEPS = 6, 4


def micro_batch(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + index)
    return torch.randn(8, 3, 5, 5, generator=generator) * (1 + index) + step


def statistics_on_a_rank() -> dict[str, np.ndarray]:
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")
    model = nn.Sequential(nn.BatchNorm2d(3))
    mine = range(worker.rank, MICRO_BATCHES, worker.world_size)
    statistics = RunningStatistics(model, micro_batches=len(mine), all_micro_batches=MICRO_BATCHES)
    for step in range(STEPS):
        for index, number in enumerate(mine):
            statistics.begin_micro_batch(index)
            model(micro_batch(step, number))
            statistics.end_micro_batch(index)
        if step == 1:  # somebody looks half-way: that must change nothing
            statistics.average(worker)
    statistics.average(worker)
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 4])
def test_statistics_move_once_a_step_by_the_mean_of_all_batches(world_size: int) -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    for step in range(STEPS):
        batches = [micro_batch(step, index) for index in range(MICRO_BATCHES)]
        mean = 0.9 * mean + 0.1 * torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0)
        var = 0.9 * var + 0.1 * torch.stack([b.transpose(0, 1).flatten(1).var(1) for b in batches]).mean(0)
    for state in run_ranks(world_size, statistics_on_a_rank):
        np.testing.assert_allclose(state["0.running_mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(state["0.running_var"], var, rtol=1e-5)
        assert state["0.num_batches_tracked"] == STEPS


def test_a_cumulative_average_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum=None"):
        RunningStatistics(nn.BatchNorm1d(3, momentum=None), micro_batches=1, all_micro_batches=1)


def test_layers_without_running_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 3))
    statistics = RunningStatistics(model, micro_batches=2, all_micro_batches=4)
    statistics.begin_micro_batch(0)
    model(torch.ones(4, 3))
    statistics.end_micro_batch(0)


def test_synchronized_layers_of_timm_keep_their_activation() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=3)
    model.get_submodule("bn1").eval()
    converted = with_sync_batchnorm(copy.deepcopy(model), None)
    norms = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert [norm.training for norm in norms] == [False] + [True] * (len(norms) - 1)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(converted.eval()(images), model.eval()(images))
