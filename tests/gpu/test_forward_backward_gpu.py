"""A captured step against the same step launched kernel by kernel, on one GPU; and two ways to sum on two GPUs."""

import logging
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, resnet18

from raydali.host.hardware import PrecisionName
from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.training.batchnorm import with_sync_batchnorm
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.finetuning import freeze
from raydali.training.forward_backward import WARM_UP_STEPS_OF_DDP, ForwardBackward, Precision
from raydali.training.models.factories import set_drop_path
from raydali.training.models.small_images import digits_network
from raydali.training.worker import Worker
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 rounds to 11 bits, and atomic additions round in any order: within 20 steps losses differ by some 0.1 %."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(16, 3, 32, 32, generator=generator).cuda().to(memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (16,), generator=generator).cuda()


def network(frozen: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = digits_network(10)
    model.insert(-1, nn.Dropout(0.5))
    for _ in range(2):
        model.insert(9, BasicBlock(128, 128))
    set_drop_path(model, 0.5)
    if frozen:
        freeze(model, frozen)
    return model.cuda().to(memory_format=torch.channels_last)


def cross_entropy_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda images, labels: nn.functional.cross_entropy(model(images), labels)


def losses(
    precision_name: PrecisionName, *, graph: bool, compiled: bool = False, frozen: str = "", micro_batches: int = 1
) -> list[float]:
    """Return the losses of micro-batches far beyond the capture, each with the random numbers of its own seed."""
    worker = Worker.join(torch.device("cuda", 0), cpus=1, node="")
    model, precision = network(frozen), Precision(precision_name, worker.device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, fused=True)
    forward_backward = ForwardBackward(
        *(model, cross_entropy_of(model), worker, precision),
        micro_batches=micro_batches,
        compiled=compiled,
        graph=graph,
    )
    result = []
    for number in range(micro_batches * (WARM_UP_STEPS + 11)):
        torch.manual_seed(number)
        is_last = number % micro_batches == micro_batches - 1
        result.append(forward_backward(*micro_batch(number), last=is_last).clone())
        if not is_last:
            continue
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
    assert forward_backward.is_captured == graph
    if frozen:
        same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
        assert same == {name for name in before if re.match(frozen, name)}
    return [loss.item() for loss in result]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_step_trains_as_a_launched_one(precision: PrecisionName, micro_batches: int) -> None:
    tolerance = 1e-3 if precision == "fp32" else 0.02
    captured, launched = (losses(precision, graph=graph, micro_batches=micro_batches) for graph in (True, False))
    torch.testing.assert_close(captured, launched, rtol=tolerance, atol=1e-4)


class Partly(nn.Module):
    """A network with a layer that the first two micro-batches of each step do not need, and one that none needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(inputs)
        return output if len(inputs) == 4 else output + self.other(inputs)


def gradients_of_steps(graph: bool) -> list[dict[str, torch.Tensor | None]]:
    """Return the gradients of steps of three micro-batches, computed by two functions in turn, in float64."""
    worker, precision = Worker.join(torch.device("cuda", 0), cpus=1, node=""), Precision("fp64", torch.device("cuda"))
    torch.manual_seed(0)
    model = Partly().to(worker.device, torch.float64)
    options: dict[str, Any] = {"micro_batches": 3, "graph": graph}
    small, large = (
        ForwardBackward(model, lambda inputs: model(inputs).square().mean(), worker, precision, **options)
        for _ in range(2)
    )
    result = []
    for step in range(WARM_UP_STEPS + 4):
        for index in range(3):
            generator = torch.Generator().manual_seed(3 * step + index)
            inputs = torch.randn(4 if index < 2 else 6, 8, generator=generator, dtype=torch.float64).to(worker.device)
            (small if index < 2 else large)(inputs, last=index == 2)
        named = model.named_parameters()
        result.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
        model.zero_grad(set_to_none=True)
    assert all(each.is_captured == graph for each in (small, large))
    return result


def test_replays_add_up_to_the_gradients_of_launched_micro_batches() -> None:
    for captured, launched in zip(gradients_of_steps(True), gradients_of_steps(False), strict=True):
        assert captured.keys() == launched.keys()
        for name, gradient in launched.items():
            if gradient is None:
                assert captured[name] is None and name.startswith("never")
            else:
                torch.testing.assert_close(captured[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_compiled_step_can_be_captured(micro_batches: int) -> None:
    # Compiled, dropout draws other numbers than it does launched by PyTorch itself.
    captured, launched = (
        losses("bf16", graph=graph, compiled=True, micro_batches=micro_batches) for graph in (True, False)
    )
    torch.testing.assert_close(captured, launched, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [r"[01]\.", r"\d\."])
def test_a_frozen_part_can_be_captured(frozen: str, compiled: bool) -> None:
    launched = losses("fp32", graph=False, compiled=compiled, frozen=frozen)
    torch.testing.assert_close(
        losses("fp32", graph=True, compiled=compiled, frozen=frozen), launched, rtol=1e-3, atol=1e-4
    )


def test_a_model_that_cannot_be_captured_trains_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = digits_network(10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(images)
            logits = nn.functional.dropout(logits, 0.1)  # a failed capture must leave the random numbers usable
            return logits * (2.0 if logits.sum().item() > 0 else 1.0)

    worker = Worker.join(torch.device("cuda", 0), cpus=1, node="")
    model = Asking().cuda()
    forward_backward = ForwardBackward(
        model, cross_entropy_of(model), worker, Precision("fp32", worker.device), micro_batches=1, graph=True
    )
    with caplog.at_level(logging.WARNING):
        for number in range(WARM_UP_STEPS + 3):
            model.zero_grad(set_to_none=True)
            loss = forward_backward(*micro_batch(number))
            assert loss.isfinite()
            assert all(parameter.grad is not None for parameter in model.parameters())
    assert caplog.text.count("as a CUDA graph") == 1


def weights_and_losses(ddp: bool) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train far beyond the capture, on one of several GPUs, and return the weights and the losses of this rank."""
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    worker = Worker.join(torch.device("cuda", torch.distributed.get_rank()), cpus=1, node="")
    model, precision = network().to(worker.device), Precision("fp32", worker.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    with patch("raydali.training.forward_backward.ddp_is_slower", return_value=not ddp):
        forward_backward = ForwardBackward(
            model, cross_entropy_of(model), worker, precision, micro_batches=2, graph=True
        )
    assert isinstance(forward_backward.allreduce, AllReduceTimer)
    losses = []
    for number in range(2 * WARM_UP_STEPS_OF_DDP):
        torch.manual_seed(number)
        images, labels = micro_batch(2 * number + worker.rank)
        losses.append(forward_backward(images.to(worker.device), labels.to(worker.device)).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert forward_backward.is_captured
    begun, ended = forward_backward.allreduce._captured or pytest.fail("the all-reduce has no events")
    ended.synchronize()
    assert 0 < begun.elapsed_time(ended) < 1000
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.named_parameters()}, losses


def weights_of_unequal_ranks(graph: bool) -> dict[str, np.ndarray]:
    """Train in float64 on five micro-batches a step, which ranks have in unequal numbers."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = Worker.join(torch.device("cuda", rank), cpus=1, node="")
    torch.manual_seed(rank)
    model, precision = Partly().to(worker.device, torch.float64), Precision("fp64", worker.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = ForwardBackward(
        model, lambda inputs: model(inputs).square().mean(), worker, precision, micro_batches=5, graph=graph
    )
    for first in range(0, 5 * (WARM_UP_STEPS + 6), 5):
        mine = range(first + rank, first + 5, world_size)
        for number in mine:
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(worker.device)
            step(inputs, last=number == mine[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert step.is_captured == graph
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.named_parameters()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_replay_unequal_numbers_of_micro_batches() -> None:
    (expected,) = run_ranks(1, weights_of_unequal_ranks, False)
    for weights in run_ranks(2, weights_of_unequal_ranks, True):
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_sum_in_the_graph_trains_as_ddp_does() -> None:
    (weights, losses), (others, _) = run_ranks(2, weights_and_losses, False)
    (expected, of_ddp), _ = run_ranks(2, weights_and_losses, True)
    np.testing.assert_allclose(losses, of_ddp, rtol=1e-3, atol=1e-4)
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], others[name], rtol=0)
        np.testing.assert_allclose(weights[name], weight, rtol=0.02, atol=1e-3, err_msg=name)


def gradients_with_sync_batchnorm(fused: bool) -> dict[str, np.ndarray]:
    """Compute gradients over two GPUs: by PyTorch's own layers, or compiled, fused and captured."""
    torch.backends.cudnn.allow_tf32 = False
    worker = Worker.join(torch.device("cuda", torch.distributed.get_rank()), cpus=1, node="")
    torch.manual_seed(0)
    model = with_sync_batchnorm(resnet18(num_classes=10), worker.gradients, fused=fused)
    model = model.to(worker.device).to(memory_format=torch.channels_last)
    options: dict[str, Any] = {"compiled": fused, "fused": fused, "graph": fused}
    precision = Precision("fp32", worker.device)
    step = ForwardBackward(model, cross_entropy_of(model), worker, precision, micro_batches=2, **options)
    images, labels = (each.to(worker.device) for each in micro_batch(worker.rank))
    for _ in range(step.warm_up_steps + 2):
        model.zero_grad(set_to_none=True)
        step(images, labels)
    assert step.is_captured == fused
    return {name: each.grad.cpu().numpy() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_fused_batchnorm_over_ranks_has_the_gradients_of_torchs_own() -> None:
    (expected, _), (found, others) = (run_ranks(2, gradients_with_sync_batchnorm, fused) for fused in (False, True))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name
        np.testing.assert_array_equal(found[name], others[name])
