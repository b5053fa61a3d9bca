"""Captured micro-batches train as launched ones. CPUs have no CUDA graphs: a stand-in runs again what was captured."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from raydali.training.checkpoint_file import local
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.sharding import Sharding
from raydali.training.worker import Worker
from tests.support.quick import first_quick
from tests.support.ranks import CPU, run_ranks

STEPS = 6


class StandIn:
    """Captures functions: their tensors stay, and a replay overwrites them.

    FSDP2 may see each micro-batch once only, so the first replay of a sharded network is what the capture computed.

    Attributes:
        after: for each capture, whether it follows another one.
    """

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        self._parameters = [*model.parameters()]  # FSDP2 puts others in their places while they are whole
        self._sharded, self.after = sharded, list[bool]()

    def __call__(self, function: Callable[[], torch.Tensor], _: str, after: object) -> tuple[Any, torch.Tensor]:
        self.after.append(after is not None)
        loss, is_done = function(), self._sharded
        gradients = [parameter.grad for parameter in self._parameters]

        def replay() -> None:
            nonlocal is_done
            before = [parameter.grad for parameter in self._parameters]
            if not is_done:
                for parameter in self._parameters:
                    parameter.grad = None
                loss.copy_(function())
            for parameter, kept, gradient in zip(self._parameters, before, gradients, strict=True):
                if gradient is not None and not is_done:
                    assert parameter.grad is not None
                    local(gradient).copy_(local(parameter.grad))
                parameter.grad = kept
            is_done = False

        return SimpleNamespace(replay=replay), loss


def trained(
    of_ranks: tuple[int, ...], graph: bool, sharded: bool, functions: int = 1
) -> tuple[list[float], list[bool]]:
    """Train on a number of micro-batches for each rank, of two sizes, with functions in turn.

    Returns:
        Sums of losses of all ranks and of weights after each step, and what the stand-in captured.
    """
    worker, precision = Worker.join(CPU, cpus=1, node=""), Precision("fp64", CPU)
    torch.manual_seed(0)
    model = VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=5).double()
    nn.init.normal_(model.heads.get_submodule("head").get_parameter("weight"))
    sharding = None
    if sharded:
        sharding = Sharding(worker, worker.world_size, precision.dtype, several=sum(of_ranks) > len(of_ranks))
        sharding.shard(model)
    optimizer, stand_in = torch.optim.SGD(model.parameters(), lr=0.1), StandIn(model, sharded)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    options: dict[str, Any] = {"micro_batches": sum(of_ranks), "graph": graph, "sharding": sharding}
    steps = [ForwardBackward(model, loss, worker, precision, **options) for _ in range(functions)]
    found = list[float]()
    for number in range(2 * STEPS):
        for step in steps if number == STEPS else ():
            step.expect_other_shapes()
        generator, total = torch.Generator().manual_seed(number), torch.zeros(1, dtype=torch.float64)
        for rank, micro_batches in enumerate(of_ranks):
            for index in range(micro_batches):
                size = 2 if number < STEPS else 3
                images = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64)
                if rank == worker.rank:
                    with patch("raydali.training.forward_backward.capture", stand_in):
                        is_last = index == micro_batches - 1
                        total += steps[index % functions](images, torch.arange(size), last=is_last)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        weights = sum(local(parameter.detach()).square().sum() for parameter in model.parameters())
        found += map(sum, zip(*worker.exchange((total.item(), float(weights))), strict=True))
    assert {step.is_captured for step in steps} == {graph and not (sharded and functions > 1)}
    return found, stand_in.after


@first_quick("of_ranks", [(3, 2), (1, 1), (3,), (1,)])
def test_of_whole_networks_one_kind_is_captured(of_ranks: tuple[int, ...]) -> None:
    (expected, _), *_ = run_ranks(len(of_ranks), trained, of_ranks, False, False)
    for found, after in run_ranks(len(of_ranks), trained, of_ranks, True, False):
        assert found == pytest.approx(expected, rel=1e-12)
        assert after == [False, False]


@first_quick("of_ranks", [(4, 3), (2, 1), (1, 1)])
def test_of_sharded_networks_the_first_the_last_and_those_between_are_captured(of_ranks: tuple[int, ...]) -> None:
    (expected, _), *_ = run_ranks(2, trained, of_ranks, False, True)
    for micro_batches, (found, after) in zip(of_ranks, run_ranks(2, trained, of_ranks, True, True), strict=True):
        assert found == pytest.approx(expected, rel=1e-12)
        assert after == [False, True, True][: min(micro_batches, 3)] * 2


def test_two_functions_of_whole_networks_are_captured_and_of_sharded_ones_launched() -> None:
    (expected, _), *_ = run_ranks(2, trained, (3, 2), False, True)
    for sharded in (False, True):
        for found, after in run_ranks(2, trained, (3, 2), True, sharded, 2):
            assert found[::2] == pytest.approx(expected[::2], rel=1e-12)
            assert after == ([] if sharded else [False] * 4)
