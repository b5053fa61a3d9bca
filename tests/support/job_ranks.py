"""What tests run as a rank of `run_ranks`: a job's train(), to its end or to a cut."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest
import torch

from raydali.measure import ceiling
from raydali.run.folder import RunFolder
from raydali.train import precision
from raydali.train.weights.matching import MatchedWeights
from tests.support.ranks import LocalSession


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ceilings count on a machine that does other things too, as one that runs tests does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "VOID_ABOVE", inf)
        patch.setattr(ceiling, "MAX_FOREIGN", inf)
        yield


def train_rank(
    train: Callable[..., None],
    config: Any,
    data: Any,
    folder: RunFolder,
    stop_at: int | None = None,
    weights: MatchedWeights | None = None,
) -> dict[str, Any]:
    """The weights in the last checkpoint, of a run that starts from other weights."""
    session = LocalSession(folder, stop_at=stop_at)
    session.weights = weights
    with undisturbed():
        train(config, data, session)
    session.finish()
    state = session.latest()
    assert state is not None
    return {name: tensor.numpy() for name, tensor in state["state"]["model"].items()}


def train_rank_in_double(train: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """The same in float64.

    In float32 a ReLU that rounding flips makes the run differ within ten steps; here only real differences remain.
    """
    torch.set_default_dtype(torch.float64)
    precision._DTYPES["fp32"] = torch.float64
    return train_rank(train, *arguments)
