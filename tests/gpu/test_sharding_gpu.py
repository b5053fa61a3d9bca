"""Sharded networks on two GPUs: captured steps against launched ones, and real runs through a resume on one GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchvision.models import VisionTransformer

from raydali.host.hardware import PrecisionName
from raydali.measure.allreduce_wait import GatherTimer
from raydali.run.folder import RunFolder
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.sharding import Sharding
from raydali.training.worker import Worker
from tests.support.cluster import finished_run
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def losses(graph: bool, compiled: bool, of_ranks: tuple[int, int], name: PrecisionName) -> list[float]:
    """Train a sharded network, gather it for a validation in between, and change the size of its batches.

    Returns:
        Losses of this rank's micro-batches, of which each rank has its own number, norms of gradients, and outputs.
    """
    worker = Worker.join(torch.device("cuda", torch.distributed.get_rank()), cpus=1, node="")
    precision, mine = Precision(name, worker.device), of_ranks[worker.rank]
    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(
        32, 8, num_layers=4, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=5, dropout=0.1
    )
    sharding = Sharding(worker, worker.world_size, precision.dtype, several=sum(of_ranks) > 2)
    assert sharding.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    step = ForwardBackward(
        model, loss, worker, precision, micro_batches=sum(of_ranks), compiled=compiled, graph=graph, sharding=sharding
    )
    found, phase = list[float](), step.warm_up_steps + 4
    for number in range(3 * phase):
        if number == 2 * phase:
            step.expect_other_shapes()
        generator = torch.Generator().manual_seed(2 * number + worker.rank)
        size = 8 if number < 2 * phase else 4
        for index in range(mine):
            images = torch.randn(size, 3, 32, 32, generator=generator).to(worker.device)
            labels = torch.randint(0, 5, (size,), generator=generator).to(worker.device)
            torch.manual_seed(mine * number + index)
            found.append(step(images, labels, last=index == mine - 1).item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        assert isinstance(norm, DTensor)
        found.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 5 == 4:
            with sharding.whole(), torch.no_grad():
                found.append(model.eval()(images).square().mean().item())
            model.train()
    assert step.is_captured == graph
    assert isinstance(step.allreduce, GatherTimer)
    if graph:  # the four blocks, and what is beside them: weights of both passes, and sums of gradients, in each graph
        notes = step.allreduce._notes
        torch.cuda.synchronize()
        waits = [begun.elapsed_time(ended) for begun, ended in zip(notes[::2], notes[1::2], strict=True)]
        assert len(waits) == 3 * 5 * min(mine, 3) and all(0 <= wait < 1000 for wait in waits)
    return found


@pytest.mark.parametrize(
    ("compiled", "of_ranks", "precision"),
    [
        (False, (1, 1), "fp32"),
        (True, (1, 1), "fp32"),
        (False, (2, 1), "fp32"),
        (False, (4, 3), "bf16"),
        (True, (3, 2), "fp32"),
    ],
)
def test_captured_steps_of_a_sharded_network_train_as_launched_ones(
    compiled: bool, of_ranks: tuple[int, int], precision: PrecisionName
) -> None:
    with_graph, without = (run_ranks(2, losses, graph, compiled, of_ranks, precision) for graph in (True, False))
    for found, expected in zip(with_graph, without, strict=True):
        assert found == pytest.approx(expected, rel=1e-3 if precision == "fp32" else 0.03)


def test_a_sharded_run_goes_on_with_one_gpu(tmp_path: Path) -> None:
    common = ["--gpu", "--global-batch-size", "128", "--batch-size", "64", "--checkpoint-every", "7", "--no-ceiling"]
    finished_run(tmp_path, "run", "--workers", "2", "--shard", "--epochs", "8", "--stop-after", "4", *common)
    finished_run(tmp_path, "run", "--workers", "1", "--epochs", "8", *common)
    rows = RunFolder(str(tmp_path), "run").rows("epochs.jsonl")
    assert [len(row["ranks"]) for row in rows] == [2] * 4 + [1] * 4, (tmp_path / "run.log").read_text()
    assert rows[-1]["validation"]["top1"] > 0.9
