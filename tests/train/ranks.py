"""What tests run as a rank of `run_ranks`: a job's train(), to its end or to a cut."""

from collections.abc import Callable
from typing import Any

import torch

from raydali.report.run_folder import RunFolder
from raydali.train import precision
from tests.support import LocalSession


def train_rank(
    train: Callable[..., None], config: Any, data: Any, folder: RunFolder, stop_at: int | None = None
) -> dict[str, Any]:
    """The weights in the last checkpoint."""
    session = LocalSession(folder, stop_at=stop_at)
    train(config, data, session)
    session.finish()
    state = session.latest()
    assert state is not None
    return {name: tensor.numpy() for name, tensor in state["state"]["model"].items()}


def train_rank_in_double(
    train: Callable[..., None], config: Any, data: Any, folder: RunFolder, stop_at: int | None = None
) -> dict[str, Any]:
    """The same in float64. In float32 a ReLU that rounding flips makes another run of it within ten steps; here only
    what is really different can differ."""
    torch.set_default_dtype(torch.float64)
    precision._DTYPES["fp32"] = torch.float64
    return train_rank(train, config, data, folder, stop_at)
