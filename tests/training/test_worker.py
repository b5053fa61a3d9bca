"""Ranks tell each other JSON and bytes of any size, and unpickle nothing."""

import math
from typing import Any

import pytest
import torch

from raydali.training.worker import Worker
from tests.support.quick import first_quick
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def value_of(rank: int) -> Any:
    """Of another size on each rank, the largest some MB."""
    nan = [math.nan, math.inf, 0.1 + rank]
    return {"rank": rank, "none": None, "numbers": nan, "path": "p\udcff/ü", "long": "x" * (3_000_000 * rank)}


def same(value: Any, other: Any) -> bool:
    return repr(value) == repr(other)  # NaN is not equal to itself


def tell() -> list[str]:
    """What does not come as it should."""
    worker = Worker.join(CPU, cpus=1, node="")
    mine, ranks = value_of(worker.rank), range(worker.world_size)
    everyone = [value_of(rank) for rank in ranks]
    contents = [bytes([rank]) * rank for rank in ranks]
    found = {
        "gather": same(worker.gather(mine), everyone if worker.rank == 0 else []),
        "gather_bytes": worker.gather_bytes(contents[worker.rank]) == (contents if worker.rank == 0 else []),
        "exchange": same(worker.exchange(mine), everyone),
        "from_first": same(worker.from_first(value_of(2 - worker.rank)), value_of(2)),
        "tuples": worker.exchange((1, "a")) == [[1, "a"]] * worker.world_size,
    }
    return [name for name, is_right in found.items() if not is_right]


@first_quick("world_size", [3, 1, 2])
def test_values_come_as_they_were(world_size: int) -> None:
    assert run_ranks(world_size, tell) == [[]] * world_size


def tensors() -> list[torch.Tensor]:
    """Dense ones, whose strides stay, and at the end one that is not dense."""
    numbers = torch.arange(2.0 * 3 * 4 * 5)
    weights = numbers.view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [weights, numbers.view(6, 20).t(), numbers[7:9], torch.tensor(True), torch.empty(0, 3), numbers[::2]]


def receive() -> list[bool]:
    worker = Worker.join(CPU, cpus=1, node="")
    state = {"all": tensors()} if worker.rank == 0 else None
    received: list[torch.Tensor] = worker.state_from_first(state)["all"]
    strides = [each.stride() for each in tensors()[:-1]] + [(1,)]
    return [
        torch.equal(mine, sent) and mine.dtype == sent.dtype and mine.stride() == stride
        for mine, sent, stride in zip(received, tensors(), strides, strict=True)
    ]


def test_tensors_of_the_first_come_with_their_strides() -> None:
    assert run_ranks(2, receive) == [[True] * len(tensors())] * 2


@pytest.mark.parametrize("call", [Worker.gather, Worker.exchange, Worker.from_first])
def test_what_only_a_pickle_could_hold_is_refused(call: Any) -> None:
    with pytest.raises(TypeError):
        call(Worker.join(CPU, cpus=1, node=""), object())
