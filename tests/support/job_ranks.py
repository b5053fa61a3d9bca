"""What tests run as a rank of `run_ranks`: a job's train(), to its end or to a cut."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from raydali.launch.worker import ceiling
from raydali.measure import records
from raydali.run.folder import RunFolder
from raydali.training.weights.matching import MatchedWeights
from tests.support.ranks import LocalSession


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ceilings count on a machine that does other things too, as one that runs tests does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "VOID_ABOVE", inf)
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
    session.checkpoints.finish()
    session.checkpoints.sharding = None  # its weights are whole, however they were saved
    state = session.checkpoints.newest()
    assert state is not None
    return {name: tensor.numpy() for name, tensor in state["state"]["model"].items()}


def train_rank_in_double(train: Callable[..., None], config: Any, *arguments: Any) -> dict[str, Any]:
    """The same in float64.

    In float32 a ReLU that rounding flips makes the run differ within ten steps; here only real differences remain.
    """
    return train_rank(train, replace(config, precision="fp64"), *arguments)
