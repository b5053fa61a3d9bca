"""The processes of `raydali bench` on several GPUs."""

import pytest
import torch

from raydali.bench.processes import join_ranks, run_ranks
from raydali.train.worker import Worker

pytestmark = pytest.mark.gpu


def all_reduced(_: None, rank: int, port: int) -> float:
    join_ranks(rank, 2, port)
    device = torch.device("cuda", rank)
    worker = Worker.join(device, cpus=1, node="local")
    total = torch.tensor(float(rank + 1), device=device)
    torch.distributed.all_reduce(total, group=worker.gradients)
    return total.item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_with_nccl_end_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert run_ranks(all_reduced, None, 2, timeout=200) == [3.0, 3.0]
    printed = capfd.readouterr()
    assert not [line for line in (printed.out + printed.err).splitlines() if "NCCL" in line or "TCPStore" in line]
