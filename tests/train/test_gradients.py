"""The sum of gradients after the backward pass against one worker and DDP, in float64, with parameters not in use."""

import numpy as np
import pytest
import torch
from torch import nn

from raydali.train.step import ForwardBackward, Precision
from raydali.train.worker import Worker
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(
    ("world_size", "overlap", "uses_all"), [(2, False, False), (3, False, False), (3, False, True), (2, True, True)]
)
def test_weights_are_those_of_one_worker(world_size: int, overlap: bool, uses_all: bool) -> None:
    (expected,) = run_ranks(1, train_rank, overlap, uses_all)
    for weights in run_ranks(world_size, train_rank, overlap, uses_all):
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-12, atol=1e-14, err_msg=name)
