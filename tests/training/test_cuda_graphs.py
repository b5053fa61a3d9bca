"""Parts of a model as CUDA graphs, where none can be captured: tests/gpu/test_detection_gpu.py has those that can."""

import logging

import pytest
import torch
from torch import nn

from raydali.training.cuda_graphs import WARM_UP_STEPS, GraphedParts
from raydali.training.finetuning import freeze
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def gradients(parts: int, caplog: pytest.LogCaptureFixture) -> list[torch.Tensor]:
    """The gradients of one step after the other, each of two micro-batches; and what was logged."""
    caplog.clear()
    trained, worker = model(), Worker.join(CPU, cpus=1, node="")
    forward_backward = ForwardBackward(
        *(trained, lambda inputs: trained(inputs).square().mean(), worker, Precision("fp32", CPU)),
        micro_batches=2,
        graph=parts > 0,
        parts=list(trained)[:parts],
    )
    found = []
    for number in range(2 * WARM_UP_STEPS + 2):
        forward_backward(torch.full((2, 4), float(number)), last=number % 2 == 1)
        if number % 2 == 1:
            found += [each.grad.clone() for each in trained.parameters() if each.grad is not None]
            trained.zero_grad(set_to_none=True)
    return found


def test_a_part_that_cannot_be_captured_is_launched_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    expected = gradients(0, caplog)
    assert not caplog.records
    torch.testing.assert_close(gradients(2, caplog), expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and all(each.startswith("Linear cannot be captured") for each in warnings)


def test_the_model_is_as_before_outside_of_the_context_also_after_an_error() -> None:
    trained = model()
    parts = GraphedParts(list(trained))
    with pytest.raises(ValueError, match="no loss"), parts:
        assert all("forward" in vars(each) for each in trained)
        raise ValueError("no loss")
    assert not any("forward" in vars(each) for each in trained)


def test_a_frozen_part_is_left_as_it_is() -> None:
    trained = model()
    freeze(trained, "0")
    with GraphedParts(list(trained)):
        assert ["forward" in vars(each) for each in trained] == [False, True]
