"""Forward and backward of a micro-batch against autograd, one worker and DDP."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.models.small_images import digits_network
from raydali.training.worker import Worker
from tests.support.quick import first_quick
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return digits_network(10)


def cross_entropy_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda images, labels: nn.functional.cross_entropy(model(images), labels)


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradients_of_rank(micro_batches: int) -> dict[str, np.ndarray]:
    worker = Worker.join(CPU, cpus=1, node="")
    model = network()
    forward_backward = ForwardBackward(
        model, cross_entropy_of(model), worker, Precision("fp32", CPU), micro_batches=micro_batches
    )
    mine = range(worker.rank, micro_batches, worker.world_size)
    for number in mine:
        forward_backward(*micro_batch(number), last=number == mine[-1])
    return gradients(model)


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 3), (2, 3)])
def test_gradients_are_the_mean_over_the_global_batch(world_size: int, micro_batches: int) -> None:
    model = network()
    for number in range(micro_batches):
        images, labels = micro_batch(number)
        (nn.functional.cross_entropy(model(images), labels) / micro_batches).backward()
    expected = gradients(model)
    for result in run_ranks(world_size, gradients_of_rank, micro_batches):
        assert result.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(result[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_loss_is_the_micro_batches_own_and_carries_no_graph() -> None:
    model, worker = network(), Worker.join(CPU, cpus=1, node="")
    forward_backward = ForwardBackward(model, cross_entropy_of(model), worker, Precision("fp32", CPU), micro_batches=5)
    images, labels = micro_batch(0)
    loss = forward_backward(images, labels)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(network()(images), labels).item())


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    worker, precision = Worker.join(CPU, cpus=1, node=""), Precision("fp32", CPU)
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        step = ForwardBackward(model, cross_entropy_of(model), worker, precision, micro_batches=1, compiled=compiled)
        losses.append(step(*micro_batch(0)).item())
    assert losses[0] == pytest.approx(losses[1])


# ---------------------------------------------------------------------------------------------------------------------
# Mixed precision


def overflow_on_rank_1(overlap: bool) -> tuple[float, float, list[float]]:
    """Two fp16 steps; in the first, rank 1's loss overflows. Scales after each, and the change of the weights."""
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")
    precision = Precision("fp16", worker.device)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    step = ForwardBackward(
        model,
        lambda factor: (model(torch.ones(2, 4)) * factor).mean(),
        worker,
        precision,
        micro_batches=2,
        overlap=overlap,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    scales, moved = [], []
    for overflows in (worker.rank == 1, False):
        step(torch.tensor(1e38 if overflows else 1.0))
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad()
        scales.append(precision.scaler.get_scale())
        moved.append((model.weight - before).abs().max().item())
    return scales[0], scales[1], moved


@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_skip_the_step_that_one_overflows_in(overlap: bool) -> None:
    first, second = run_ranks(2, overflow_on_rank_1, overlap)
    assert first == second
    after_overflow, after_good_step, moved = first
    assert after_overflow == after_good_step == 2.0**15  # halved once
    assert moved[0] == 0 < moved[1]


def test_autocast_runs_in_the_named_type() -> None:
    for name, expected in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        precision = Precision(name, torch.device("cpu"))  # type: ignore[arg-type]
        with precision.autocast():
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected
        assert precision.scaler.is_enabled() == (name == "fp16")
        assert precision.of_parameters == torch.float32
    assert Precision("fp64", torch.device("cpu")).of_parameters == torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# Sums of gradients, in float64, with parameters that are not in use

MICRO_BATCHES = 7


class Network(nn.Module):
    """Layers in channels-last memory, one that is frozen, one that only some inputs use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Conv2d(5, 5, 1).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(5, 2), nn.Linear(5, 2)
        self.last = nn.Linear(5, 2)

    def forward(self, images: torch.Tensor, used: list[str]) -> torch.Tensor:
        pooled = self.frozen(self.first(images)).mean((2, 3))
        return torch.stack([self.get_submodule(name)(pooled) for name in used]).sum(0)


def train_rank(overlap: bool, uses_all: bool) -> dict[str, np.ndarray]:
    """Weights after three steps; at first only rank 0 has the right ones."""
    torch.set_default_dtype(torch.float64)
    worker = Worker.join(CPU, cpus=1, node="")
    torch.manual_seed(worker.rank)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def loss(images: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        used = ["last", *["sometimes"] * bool(number == 5 or uses_all), *["never"] * uses_all]
        result: torch.Tensor = model(images, used).square().mean()
        return result

    step = ForwardBackward(model, loss, worker, Precision("fp32", CPU), micro_batches=MICRO_BATCHES, overlap=overlap)
    for first in range(0, 3 * MICRO_BATCHES, MICRO_BATCHES):
        mine = range(first + worker.rank, first + MICRO_BATCHES, worker.world_size)
        for number in mine:
            images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(number))
            step(images, torch.tensor(number), last=number == mine[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@first_quick(
    ("world_size", "overlap", "uses_all"), [(2, False, False), (3, False, False), (3, False, True), (2, True, True)]
)
def test_weights_are_those_of_one_worker(world_size: int, overlap: bool, uses_all: bool) -> None:
    (expected,) = run_ranks(1, train_rank, overlap, uses_all)
    for weights in run_ranks(world_size, train_rank, overlap, uses_all):
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-12, atol=1e-14, err_msg=name)
