"""The compiled forward pass of a validation: nothing is compiled in it, and its outputs are those of the model."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from raydali.training.evaluation.validation import ValidationForward, evaluating
from raydali.training.forward_backward import Precision

PRECISION = Precision("fp32", torch.device("cpu"))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Counts compilations, in place of the compiler."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


def outputs(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    with evaluating(model), torch.no_grad():
        result: torch.Tensor = model(samples)
    return result


def test_batches_of_all_sizes_use_what_was_compiled_before(counter: CompileCounter) -> None:
    model = network()
    mean = model.get_buffer("1.running_mean")
    inference, before = ValidationForward(model, PRECISION), mean.clone()
    inference.warm_up(torch.randn(16, 3, 8, 8), compiled=True, graph=False)
    assert torch.equal(mean, before) and model.training and inference.training
    compiled = counter.frame_count
    assert compiled
    for count in (16, 1, 7, 16):
        samples = torch.randn(count, 3, 8, 8)
        torch.testing.assert_close(outputs(inference, samples), outputs(model, samples))
        with torch.no_grad():  # as a step does
            model.get_parameter("0.weight").add_(0.1)
            mean.add_(0.1)
    assert counter.frame_count == compiled


@pytest.mark.parametrize(
    "samples", [torch.zeros(16, 3, 8, 9), torch.zeros(17, 3, 8, 8), torch.zeros(2, 3, 8, 8).double()]
)
def test_other_samples_run_uncompiled(samples: torch.Tensor, counter: CompileCounter) -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    inference = ValidationForward(model, PRECISION)
    inference.warm_up(torch.randn(16, 3, 8, 8), compiled=True, graph=False)
    compiled = counter.frame_count
    assert torch.equal(outputs(inference, samples), outputs(model, samples))
    assert counter.frame_count == compiled


def test_it_trains_as_the_model_does() -> None:
    model = network()
    inference = ValidationForward(model, PRECISION)
    inference.warm_up(torch.randn(16, 3, 8, 8), compiled=False, graph=False)
    inference(torch.randn(16, 3, 8, 8)).sum().backward()
    assert model.get_parameter("0.weight").grad is not None
