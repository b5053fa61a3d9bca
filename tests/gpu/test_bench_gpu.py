"""The processes of `raydali bench` on GPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from raydali.bench import strategies, train
from raydali.bench.processes import join_ranks, run_ranks
from raydali.bench.strategies import StrategiesBench
from raydali.bench.train import TrainBench
from raydali.training.worker import Worker

pytestmark = pytest.mark.gpu


def all_reduced(_: None, rank: int, port: int) -> float:
    join_ranks(rank, 2, port)
    device = torch.device("cuda", rank)
    worker = Worker.join(device, cpus=1, node="local")
    total = torch.tensor(float(rank + 1), device=device)
    torch.distributed.all_reduce(total, group=worker.gradients)
    return total.item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_with_nccl_end_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert run_ranks(all_reduced, None, 2, timeout=200) == [3.0, 3.0]
    printed = capfd.readouterr()
    assert not [line for line in (printed.out + printed.err).splitlines() if "NCCL" in line or "TCPStore" in line]


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_loader_trains(compile: bool) -> None:
    options = TrainBench(make=64, gpus="1", batch_size=8, image_size=64, threads=2, steps=3, repeats=1)
    options = replace(options, models="resnet18", loaders="raydali,native,torchvision,synthetic", compile=compile)
    rows = train.main(options)["rows"]
    for row in rows:
        assert row["error"] is None and row["of_ceiling"] > 0 and 0 <= row["loader_wait_fraction"] < 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_strategy_trains() -> None:
    """In fp16 with DALI, in fp32 with torch's DataLoader."""
    options = StrategiesBench(make=64, model="resnet18", gpus=2, batch_size=8, image_size=64, steps=3, repeats=1)
    for precision, loader in (("amp", "dali"), ("fp32", "torch")):
        settings: dict[str, Any] = {"precisions": precision, "loaders": loader, "threads": 2, "workers": 2}
        rows = strategies.main(replace(options, **settings))["rows"]
        captured = [(row["strategy"], row["captured"]) for row in rows]
        assert captured == [("one", True), ("dp", False), ("ddp", True), ("sync-bn", True)]
        assert all(row["error"] is None and row["images_per_second"] > 0 for row in rows)
