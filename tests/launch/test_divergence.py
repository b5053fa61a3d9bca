"""A run whose weights are no numbers any more ends, and its newest checkpoint is one from before."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.imagenet import DIGITS, train
from raydali.errors import DivergedError
from raydali.train.checkpoints import is_finite
from tests.digits import digits_data
from tests.support import LocalSession, folder_of


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    config = replace(DIGITS, epochs=3, batch_size=32, global_batch_size=32, checkpoint_every=10, name="run")
    session = LocalSession(folder_of(tmp_path))
    with pytest.raises(DivergedError, match="lower --learning-rate"):
        train(
            replace(config, learning_rate=1e30, warmup_epochs=0.0),
            digits_data(),
            session,
        )
    session.finish()
    state = session.latest()
    assert state is None or is_finite(state["state"]["model"])
    assert not [row for row in session.folder.rows("epochs.jsonl") if row["loss"] != row["loss"]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_weight_of_many_is_seen(bad: float) -> None:
    first = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8))
    assert is_finite(model.state_dict())
    with torch.no_grad():
        first.weight[3, 4] = bad
    assert not is_finite(model.state_dict())
