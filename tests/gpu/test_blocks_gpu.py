"""Activations that are computed again on a GPU, launched, captured and compiled."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet

from raydali.training.blocks import recomputed
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker

pytestmark = pytest.mark.gpu

CALLS = WARM_UP_STEPS + 4


def forward_backward(model: nn.Module, loss: Callable[..., torch.Tensor], *, compiled: bool) -> ForwardBackward:
    worker = Worker.join(torch.device("cuda", 0), cpus=1, node="")
    precision = Precision("fp64", worker.device)
    return ForwardBackward(model, loss, worker, precision, micro_batches=1, graph=True, compiled=compiled)


def trained(model: nn.Module, *, compiled: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The last loss, gradients and buffers, and the peak of the memory in the last call."""
    run = forward_backward(model, lambda images, labels: F.cross_entropy(model(images), labels), compiled=compiled)
    for number in range(CALLS):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(16, 3, 128, 128, generator=generator, dtype=torch.float64).cuda()
        model.zero_grad(set_to_none=True)
        loss = run(images, torch.arange(16, device="cuda") % 10)
    assert run.is_captured
    memory = torch.cuda.max_memory_allocated()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.clone(), **gradients, **dict(model.named_buffers())}, memory


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_network_trains_the_same_in_less_memory(compiled: bool) -> None:
    torch.manual_seed(0)
    kept = ResNet(Bottleneck, [3, 3, 3, 3], num_classes=10).cuda().double()
    changed = deepcopy(kept)
    recomputed(changed)
    peaks = []
    results = []
    for model in (changed, kept):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result, memory = trained(model, compiled=compiled)
        results.append(result)
        peaks.append(memory - before)
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-8, atol=1e-10, msg=name)
    assert peaks[0] < 0.7 * peaks[1]


class Dropping(nn.Module):
    """A block that is linear in each of its matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output, of which dropout is a part."""
        output: torch.Tensor = self.second(F.dropout(self.first(inputs), 0.5))
        return output


@pytest.mark.parametrize("compiled", [False, True])
def test_random_numbers_are_drawn_again(compiled: bool) -> None:
    """The loss is linear in the matrices: it equals the product with their gradients, if these have the same mask."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Dropping(), Dropping()]).cuda().double()
    recomputed(blocks)
    run = forward_backward(
        blocks, lambda inputs: sum((one(inputs).sum() for one in blocks), torch.zeros(())), compiled=compiled
    )
    inputs = torch.randn(32, 64, dtype=torch.float64).cuda()
    losses = set()
    for number in range(CALLS):
        torch.manual_seed(number)
        blocks.zero_grad(set_to_none=True)
        loss = run(inputs).clone()
        for position in ("first", "second"):
            matrices = [getattr(block, position).weight for block in blocks]
            product = sum((matrix * matrix.grad).sum() for matrix in matrices)
            torch.testing.assert_close(product, loss)
        losses.add(loss.item())
    assert len(losses) == CALLS, "each call has random numbers of its own"
    assert run.is_captured
