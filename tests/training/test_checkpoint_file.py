"""Snapshots on the CPU, where they are copies; tests/gpu/test_snapshot_gpu.py has those that are made meanwhile."""

import torch
from torch import nn

from raydali.training.checkpoint_file import Snapshots


def test_a_snapshot_has_the_values_of_its_time() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshots = Snapshots(torch.device("cpu"))
    copy = snapshots.take({"model": model.state_dict(), "lr": [0.1, (1, None)]}, [model])
    model(torch.randn(4, 3)).exp().sum().backward()
    snapshots.before_update()
    torch.optim.SGD(model.parameters(), 0.1).step()
    copy.wait()
    assert copy.state["lr"] == [0.1, (1, None)]
    for name, value in copy.state["model"].items():
        assert torch.equal(value, before[name]), name
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= {"0.weight", "1.running_var"}


def test_memory_is_copied_once() -> None:
    weight, other = torch.randn(4, 4), torch.randn(4)
    copy = Snapshots(torch.device("cpu")).take(
        {"state": {"a": weight, "b": other}, "best": [weight, weight.t(), weight[0]]}
    )
    of_state, (same, transposed, row) = copy.state["state"]["a"], copy.state["best"]
    assert same is of_state and same.data_ptr() != weight.data_ptr()
    assert torch.equal(transposed, weight.t()) and torch.equal(row, weight[0])
