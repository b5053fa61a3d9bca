"""Mixed precision on the CPU: the GPU's is in tests/gpu."""

import pytest
import torch
from torch import nn

from raydali.train.step import ForwardBackward, Precision
from raydali.train.worker import Worker
from tests.support.ranks import run_ranks


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
