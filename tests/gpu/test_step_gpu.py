"""A captured step against the same step launched kernel by kernel, on one GPU; and two ways to sum on two GPUs."""

import logging
import re
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from raydali.host.hardware import PrecisionName
from raydali.train.finetuning import freeze
from raydali.train.models.factories import set_drop_path
from raydali.train.models.small_images import digits_network
from raydali.train.step import WARM_UP_STEPS, WARM_UP_STEPS_OF_DDP, ForwardBackward, Precision
from raydali.train.worker import Worker
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


def losses(precision_name: PrecisionName, *, graph: bool, compiled: bool = False, frozen: str = "") -> list[float]:
    """Of steps far beyond the capture, each with the random numbers of its own seed."""
    worker = Worker.join(torch.device("cuda", 0), cpus=1, node="")
    model, precision = network(frozen), Precision(precision_name, worker.device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, fused=True)
    forward_backward = ForwardBackward(
        model, cross_entropy_of(model), worker, precision, micro_batches=1, compiled=compiled, graph=graph
    )
    result = []
    for number in range(WARM_UP_STEPS + 11):
        torch.manual_seed(number)
        result.append(forward_backward(*micro_batch(number)).clone())
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
    assert (forward_backward._graph is not None) == graph
    if frozen:
        same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
        assert same == {name for name in before if re.match(frozen, name)}
    return [loss.item() for loss in result]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_step_trains_as_a_launched_one(precision: PrecisionName) -> None:
    tolerance = 1e-3 if precision == "fp32" else 0.02
    torch.testing.assert_close(losses(precision, graph=True), losses(precision, graph=False), rtol=tolerance, atol=1e-4)


def test_a_compiled_step_can_be_captured() -> None:
    # Compiled, dropout draws other numbers than it does launched by PyTorch itself.
    launched = losses("bf16", graph=False, compiled=True)
    torch.testing.assert_close(losses("bf16", graph=True, compiled=True), launched, rtol=0.02, atol=1e-4)


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
    with patch("raydali.train.step.ddp_is_slower", return_value=not ddp):
        forward_backward = ForwardBackward(
            model, cross_entropy_of(model), worker, precision, micro_batches=2, graph=True
        )
    assert forward_backward.allreduce is not None
    losses = []
    for number in range(2 * WARM_UP_STEPS_OF_DDP):
        torch.manual_seed(number)
        images, labels = micro_batch(2 * number + worker.rank)
        losses.append(forward_backward(images.to(worker.device), labels.to(worker.device)).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert forward_backward._graph is not None
    begun, ended = forward_backward.allreduce._captured or pytest.fail("the all-reduce has no events")
    ended.synchronize()
    assert 0 < begun.elapsed_time(ended) < 1000
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.named_parameters()}, losses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_sum_in_the_graph_trains_as_ddp_does() -> None:
    (weights, losses), (others, _) = run_ranks(2, weights_and_losses, False)
    (expected, of_ddp), _ = run_ranks(2, weights_and_losses, True)
    np.testing.assert_allclose(losses, of_ddp, rtol=1e-3, atol=1e-4)
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], others[name], rtol=0)
        np.testing.assert_allclose(weights[name], weight, rtol=0.02, atol=1e-3, err_msg=name)
