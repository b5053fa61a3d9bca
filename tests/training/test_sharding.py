"""A sharded network is measured as the whole one, and its warm-up steps are undone."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import profile
from torchvision.models import VisionTransformer

from raydali.launch.worker.rehearsal import undone
from raydali.measure.meter import EpochMeter
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.sharding import Sharding
from raydali.training.worker import Worker
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
WAITS = "FSDP::pre_forward", "FSDP::pre_backward", "FSDP::post_backward_reduce"
"""The events of FSDP2 in which a CPU waits for other ranks: one of each for a unit."""


def sharded_vit(shards: bool = True, compiled: bool = False, **sizes: int) -> tuple[nn.Module, ForwardBackward]:
    """A network with three blocks in fp64, and the function of its loss."""
    worker, precision = Worker.join(CPU, cpus=1, node=""), Precision("fp64", CPU)
    torch.manual_seed(0)
    sizes = {"hidden_dim": 16, "mlp_dim": 24, **sizes}
    model = VisionTransformer(16, 8, num_layers=3, num_heads=2, num_classes=5, **sizes).double()
    sharding = None
    if shards:
        sharding = Sharding(worker, worker.world_size, precision.dtype, several=False)
        assert sharding.shard(model) and len(sharding.units(model)) == 4

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    options: dict[str, Any] = {"micro_batches": worker.world_size, "compiled": compiled, "fused": compiled}
    return model, ForwardBackward(model, loss, worker, precision, **options, sharding=sharding)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 3])


def counted(shards: bool) -> tuple[float | None, list[float]]:
    """The operations of an image, and the losses of four steps after they were counted; the third is undone."""
    model, step = sharded_vit(shards)
    optimizer, inputs = torch.optim.AdamW(model.parameters(), lr=0.01), batch()
    flops, losses = step.flops_per_image(*inputs), list[float]()
    for number in range(4):
        with undone([model], optimizer, Precision("fp64", CPU)) if number == 2 else nullcontext():
            losses.append(step(*inputs).item())
            optimizer.step()
            optimizer.zero_grad()
    return flops, losses


def timed() -> tuple[float, float, float]:
    """The sampled communication of a step, what FSDP2's own events say, and the whole step, in seconds."""
    _, step = sharded_vit(hidden_dim=64, mlp_dim=512)
    meter, timer, inputs = EpochMeter(CPU, rank=0, world_size=2, node=""), step.allreduce, batch()
    assert timer is not None
    step(*inputs)  # it connects the ranks
    meter.enter("step")
    timer.expect(meter)
    with profile() as profiler:
        step(*inputs)
    meter.enter("loop")
    meter.end_step()
    timer.sample(meter)
    events = profiler.key_averages()
    by_fsdp = sum(each.cpu_time_total for each in events if each.key.startswith(WAITS)) / 1e6
    assert sum(each.count for each in events if each.key.startswith(WAITS)) == 3 * 4
    record = meter.record()
    assert record.shortest_exchange_seconds is not None
    return record.shortest_exchange_seconds, by_fsdp, record.step_seconds


def compiled_functions() -> list[int]:
    """How many functions Dynamo has compiled for the blocks after a step, an evaluation, and a count of operations."""
    model, step = sharded_vit(compiled=True)
    images, labels = batch()
    step(images, labels)
    found = [counters["frames"]["ok"]]
    with torch.no_grad():
        model.eval()(images)
    found.append(counters["frames"]["ok"])
    step.flops_per_image(images, labels)
    return [*found, counters["frames"]["ok"]]


def with_a_scalar() -> None:
    model = nn.ParameterDict({"weight": torch.ones(4), "scale": torch.ones(())})
    worker = Worker.join(CPU, cpus=1, node="")
    Sharding(worker, worker.world_size, torch.float32, several=False).shard(model)


def test_a_scalar_is_refused_by_name() -> None:
    with pytest.raises(AssertionError, match=r"UsageError: --shard cannot shard scale, .*shape \(1,\)"):
        run_ranks(1, with_a_scalar)


@pytest.mark.slow  # Inductor compiles C++
def test_equal_blocks_share_compiled_code_which_training_alone_uses() -> None:
    assert run_ranks(1, compiled_functions) == [[1, 1, 1]]


def test_operations_of_a_sharded_network_are_counted_and_steps_undone_as_of_the_whole_one() -> None:
    flops, losses = counted(shards=False)
    assert flops and losses[0] > losses[1] > losses[2] == losses[3]
    for of_rank, losses_of_rank in run_ranks(2, counted, True):
        assert of_rank == flops
        assert losses_of_rank == pytest.approx(losses, rel=1e-9)


def test_communication_of_both_passes_is_timed() -> None:
    for sampled, by_fsdp, step in run_ranks(2, timed):
        assert by_fsdp < sampled < step
