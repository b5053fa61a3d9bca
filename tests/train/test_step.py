"""Forward and backward of a micro-batch against plain autograd, alone and on two ranks; rehearsals leave no trace."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydali.host.hardware import PrecisionName
from raydali.train.models.small_images import digits_network
from raydali.train.step import WARM_UP_STEPS, WARM_UP_STEPS_OF_DDP, ForwardBackward, Precision
from raydali.train.warmup import warm_up, warm_up_steps
from raydali.train.worker import Worker
from tests.support.job_ranks import undisturbed
from tests.support.ranks import run_ranks
from tests.support.warm_up_steps import take_all

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


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 1), (1, 3), (2, 2), (2, 3)])
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


def warm_up_steps_of_rank(precision_name: PrecisionName, overlap: bool) -> int:
    worker, model = Worker.join(CPU, cpus=1, node=""), network()
    precision = Precision(precision_name, CPU)
    forward_backward = ForwardBackward(
        model, cross_entropy_of(model), worker, precision, micro_batches=2, overlap=overlap
    )
    return warm_up_steps([forward_backward], torch.device("cuda"))


def test_only_ddp_and_fp16_need_many_warm_up_steps() -> None:
    assert warm_up_steps_of_rank("bf16", True) == warm_up_steps([], torch.device("cuda")) == WARM_UP_STEPS + 2
    assert warm_up_steps_of_rank("fp16", True) == WARM_UP_STEPS_OF_DDP + 2
    assert run_ranks(2, warm_up_steps_of_rank, "bf16", True) == [WARM_UP_STEPS_OF_DDP + 2] * 2
    assert run_ranks(2, warm_up_steps_of_rank, "bf16", False) == [WARM_UP_STEPS + 2] * 2


def rehearsal_of_rank(precision_name: PrecisionName, measures: bool) -> tuple[bool, float | None, int]:
    """Whether everything was as before, the ceiling, and how many steps were taken."""
    worker = Worker.join(CPU, cpus=1, node="")
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    precision = Precision(precision_name, CPU)
    forward_backward = ForwardBackward(
        model, cross_entropy_of(model), worker, precision, micro_batches=worker.world_size
    )
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        forward_backward(*micro_batch(worker.rank))
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for mean, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(now)
            next(average.parameters()).add_(1)

    def everything() -> list[Any]:
        tensors = [t.detach().clone() for m in (model, average) for t in m.state_dict().values()]
        return [tensors, copy.deepcopy(optimizer.state_dict()), precision.scaler.state_dict()]

    step()  # momenta that are not zero
    steps, before = 0, everything()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    modules = [model, average]
    with undisturbed():
        ceiling = take_all(
            warm_up(lambda: step, modules, optimizer, precision, worker, steps=1, images=4, measures_ceiling=measures)
        )
    after = everything()
    same = all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    same &= str(before[1:]) == str(after[1:])
    same &= places == [parameter.data_ptr() for parameter in model.parameters()]
    same &= all(parameter.grad is None for parameter in model.parameters())
    return same, ceiling.images_per_second, steps


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_rehearsal_leaves_no_trace(precision: PrecisionName) -> None:
    same, ceiling, steps = rehearsal_of_rank(precision, True)
    assert same and ceiling is not None and ceiling > 0 and steps >= 1 + 1 + 3


def test_without_a_ceiling_a_rehearsal_on_the_cpu_is_one_step() -> None:
    assert rehearsal_of_rank("fp32", False) == (True, None, 1)


def test_ranks_rehearse_equal_steps_and_agree_on_the_ceiling() -> None:
    results = run_ranks(2, rehearsal_of_rank, "fp32", True)
    assert all(same for same, _, _ in results)
    assert len({(ceiling, steps) for _, ceiling, steps in results}) == 1


def test_what_cannot_be_compiled_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    worker, precision = Worker.join(CPU, cpus=1, node=""), Precision("fp32", CPU)
    losses = []
    for compiled in (False, True):
        model = network()
        step = ForwardBackward(model, cross_entropy_of(model), worker, precision, micro_batches=1, compiled=compiled)
        losses.append(step(*micro_batch(0)).item())
    assert losses[0] == pytest.approx(losses[1])
