"""The verdict on real runs on GPUs in which one thing is wrong; steps are CUDA graphs, as they are by default."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raydali.measure.verdict import verdict
from raydali.training.worker import Worker
from tests.measure.test_planted import BIG, named, run
from tests.support import planted
from tests.support.planted import Plant

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPUS = {"gpu": True}
CYCLES_PER_SECOND = 1.7e9
"""Of the GPU's clock, about."""


def occupied(seconds: float) -> None:
    """The GPU computes for that long; inside a CUDA graph, each time it is replayed."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def _slower_forward(seconds: float) -> None:
    def slower(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda model, _: occupied(seconds))
        return model

    planted._with_model(slower)


def slow_model(_: int) -> None:
    """Steps of 50 ms: beside them, loading small images is nothing."""
    _slower_forward(0.05)


def slow_host(_: int) -> None:
    """The host takes 20 ms to launch the model's kernels; a CUDA graph replays them without it."""

    def slower(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        return model

    planted._with_model(slower)


def slow_rank_1(rank: int) -> None:
    """Steps of 50 ms, and of 90 ms on rank 1."""
    _slower_forward(0.09 if rank == 1 else 0.05)


def slow_network(rank: int) -> None:
    """Steps of 50 ms, and 40 ms to exchange gradients."""
    slow_model(rank)
    parallel = Worker.parallel

    def then(reduced: Any) -> torch.Tensor:
        occupied(0.04)
        gradients: torch.Tensor = reduced.value()[0]
        return gradients

    def exchange(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        return allreduce_hook(state, bucket).then(then)

    def late(self: Worker, model: nn.Module) -> Any:
        made = parallel(self, model)
        if made is not None:
            made.register_comm_hook(self.gradients, exchange)
        return made

    Worker.parallel = late  # type: ignore[method-assign]


def slow_reads_of_rank_1(rank: int) -> None:
    """Steps of 50 ms; and rank 1 reads slowly."""
    slow_model(rank)
    planted.slow_reads_of_rank_1(rank)


def slow_checkpoints(rank: int) -> None:
    slow_model(rank)
    planted.slow_checkpoints(rank)


def slow_start(rank: int) -> None:
    slow_model(rank)
    planted.slow_start(rank)


ON_ONE = [
    pytest.param(slow_model, {}, {"train": 1600}, "step-bound", id="healthy"),
    pytest.param(slow_model, {"cuda_graph": False}, {"train": 1600}, "step-bound", id="healthy, launched"),
    pytest.param(slow_host, {"cuda_graph": False}, {"train": 1600}, "launch-bound", id="slow host, launched"),
    pytest.param(planted.slow_reads, {}, {"train": 320}, "storage", id="slow reads"),
    pytest.param(
        planted.nothing, {"image_size": 32, "batch_size": 128}, {"size": BIG, "train": 5120}, "gpu decode", id="big"
    ),
    pytest.param(planted.nothing, {"loader": "torch"}, {"size": BIG, "train": 1600}, "cpu decode", id="torch"),
    pytest.param(planted.slow_inputs, {}, {"train": 320}, "python", id="slow Python"),
    pytest.param(planted.slow_inputs, {"cuda_graph": False}, {"train": 320}, "python", id="slow Python, launched"),
    pytest.param(slow_checkpoints, {"checkpoint_every": 20}, {"train": 1600}, "checkpoint", id="slow checkpoints"),
    pytest.param(slow_model, {}, {"train": 1600, "val": 900}, "validation", id="much validation"),
    # The warm-up waits for the first batch, so that no epoch does.
    pytest.param(slow_start, {"epochs": 1}, {"train": 1600}, "step-bound", id="slow start"),
    pytest.param(planted.nothing, {"epochs": 4}, {"train": 32, "val": 64}, "short epochs", id="tiny epochs"),
]
ON_TWO = [
    pytest.param(slow_model, {}, {"train": 3200}, "step-bound", id="healthy"),
    pytest.param(slow_model, {"cuda_graph": False}, {"train": 3200}, "step-bound", id="healthy, launched"),
    pytest.param(slow_rank_1, {}, {"train": 3200}, "straggler", id="a slow GPU"),
    pytest.param(slow_rank_1, {"cuda_graph": False}, {"train": 3200}, "straggler", id="a slow GPU, launched"),
    pytest.param(slow_reads_of_rank_1, {}, {"train": 960}, "straggler", id="a slow disk"),
    pytest.param(slow_network, {}, {"train": 3200}, "communication", id="slow network"),
    pytest.param(slow_network, {"cuda_graph": False}, {"train": 3200}, "communication", id="slow network, launched"),
    pytest.param(planted.slow_reads, {}, {"train": 640}, "storage", id="slow reads"),
]
NAMES = ("plant", "config", "data", "cause")


def check(
    tmp_path: Path, world_size: int, plant: Plant, config: dict[str, Any], data: dict[str, Any], cause: str
) -> None:
    line = run(tmp_path, world_size, plant, ON_GPUS | config, data, lambda line: named(line)[1] == cause)
    assert named(line)[1] == cause, line
    if cause == "straggler":
        found = verdict(line)
        assert found is not None and found.text.startswith("straggler, rank 1: ")
        assert ("its loader" in found.text) == (plant is slow_reads_of_rank_1)


@pytest.mark.parametrize(NAMES, ON_ONE)
def test_what_is_planted_is_named(
    tmp_path: Path, plant: Plant, config: dict[str, Any], data: dict[str, Any], cause: str
) -> None:
    check(tmp_path, 1, plant, config, data, cause)


@two_gpus
@pytest.mark.parametrize(NAMES, ON_TWO)
def test_what_is_planted_on_two_gpus_is_named(
    tmp_path: Path, plant: Plant, config: dict[str, Any], data: dict[str, Any], cause: str
) -> None:
    check(tmp_path, 2, plant, config, data, cause)


@two_gpus
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_an_exchange_takes_as_long_as_it_does(tmp_path: Path, cuda_graph: bool) -> None:
    config = ON_GPUS | {"cuda_graph": cuda_graph}
    for name, plant, (least, most) in (("slow", slow_network, (0.03, 0.07)), ("quick", slow_model, (0.0, 0.005))):
        line = run(tmp_path / name, 2, plant, config, {"train": 3200}, lambda line: True)
        for rank in line["ranks"]:
            assert least < rank["shortest_exchange_seconds"] < most, rank
