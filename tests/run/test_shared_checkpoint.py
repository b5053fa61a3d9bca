"""A checkpoint that several ranks go on from: rank 0 reads it, once, and the others get it from rank 0."""

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from raydali.run.folder import RunFolder
from raydali.train.checkpoint_file import serialize
from tests.support.checkpoint_stores import save
from tests.support.ranks import LocalSession, folder_of, run_ranks

STATE: dict[str, Any] = {
    "tensors": [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.tensor([0.1, -2.0], dtype=torch.bfloat16),
    ],
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
    },
    "plain": [None, True, 5, 0.5, "text"],
}


def shared(contents: bytes) -> bytes:
    """The state that this rank gets of these contents of a file, which the first one reads; as such contents."""
    from raydali.train.worker import Worker

    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")
    state = torch.load(BytesIO(contents), weights_only=True) if worker.rank == 0 else None
    return bytes(serialize(worker.state_from_first(state)))


def test_every_rank_gets_the_first_one_s_state() -> None:
    for contents in run_ranks(3, shared, bytes(serialize(STATE))):
        state = torch.load(BytesIO(contents), weights_only=True)
        assert all(map(torch.equal, state["tensors"], STATE["tensors"]))
        assert [each.dtype for each in state["tensors"]] == [each.dtype for each in STATE["tensors"]]
        assert torch.equal(state["optimizer"]["state"][0]["step"], torch.tensor(3.0))
        assert state["optimizer"]["param_groups"] == STATE["optimizer"]["param_groups"]
        assert state["plain"] == STATE["plain"]


def read_of(folder: RunFolder) -> tuple[float, int]:
    """The step of the newest checkpoint's tensors, and how often this process has read a state."""
    read: list[str] = []
    real = RunFolder.read

    def noted(self: RunFolder, file: str) -> bytes:
        read.append(file)
        return real(self, file)

    RunFolder.read = noted  # type: ignore[method-assign]
    state = LocalSession(folder).checkpoints.newest()
    assert state is not None
    return float(state["state"]["model"]["weight"][-1]), sum(Path(file).name == "state.pt" for file in read)


def test_only_the_first_rank_reads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 5, 10)
    assert run_ranks(3, read_of, folder) == [(10.0, 1), (10.0, 0), (10.0, 0)]
