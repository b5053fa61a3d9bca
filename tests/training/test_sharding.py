"""What is measured of a sharded network."""

from datetime import timedelta

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.sharding import Sharding
from raydali.training.worker import Worker
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def counted(shards: bool) -> tuple[float | None, list[float]]:
    """The operations of an image, and the losses of two steps after they were counted."""
    worker, precision = Worker.join(CPU, cpus=1, node=""), Precision("fp64", CPU)
    torch.manual_seed(0)
    model = VisionTransformer(16, 8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5).double()
    sharding = None
    if shards:
        sharding = Sharding(worker, "all", precision.dtype, several=False, timeout=timedelta(minutes=2))
        assert sharding.shard(model) and len(sharding.units(model)) == 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ForwardBackward(
        model,
        lambda images, labels: nn.functional.cross_entropy(model(images), labels),
        worker,
        precision,
        micro_batches=worker.world_size,
        sharding=sharding,
    )
    images, labels = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    flops, losses = step.flops_per_image(images, labels), list[float]()
    for _ in range(2):
        losses.append(step(images, labels).item())
        optimizer.step()
        optimizer.zero_grad()
    return flops, losses


def test_operations_of_a_sharded_network_are_counted_as_of_the_whole_one() -> None:
    flops, losses = counted(shards=False)
    assert flops and losses[1] < losses[0]
    for of_rank, losses_of_rank in run_ranks(2, counted, True):
        assert of_rank == flops
        assert losses_of_rank == pytest.approx(losses, rel=1e-9)
