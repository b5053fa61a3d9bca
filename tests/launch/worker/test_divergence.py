"""A run whose weights are no numbers any more ends, and its newest checkpoint is one from before."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.imagenet import DIGITS, train
from raydali.errors import DivergedError
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.rank_comparison import RankComparison
from raydali.launch.worker.run_state import RunState
from raydali.measure.meter import EpochMeter
from raydali.run.checkpoints import CheckpointStore
from raydali.training.batchnorm import RunningStatistics
from raydali.training.checkpoint_file import is_finite
from tests.support.digits import digits_data
from tests.support.messages import mentioning
from tests.support.ranks import LocalSession, folder_of


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    config = replace(DIGITS, epochs=3, batch_size=32, global_batch_size=32, checkpoint_every=10, name="run")
    session = LocalSession(folder_of(tmp_path))
    with pytest.raises(DivergedError, match="lower --learning-rate"):
        train(
            replace(config, learning_rate=1e30, warmup_epochs=0.0),
            digits_data(),
            session,
        )
    state = LocalSession(session.folder).checkpoints.newest()
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


def state_of(tmp_path: Path) -> RunState:
    """Of a run on one rank that has just begun."""
    options = replace(DIGITS, epochs=3, batch_size=32, global_batch_size=32)
    session = LocalSession(folder_of(tmp_path))
    broken, ranks = BrokenSamples(options, session, samples=1437), RankComparison(session, compares=True)
    return RunState(session, options.stream(1437), broken, None, {}, ranks)


def test_a_score_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    state, model = state_of(tmp_path), torch.nn.Linear(2, 2)
    scores = [float("nan"), 0.5, float("nan"), 0.4, 0.6]
    best = [state.best_of(score, model, metric="top1", epoch=0) is not None for score in scores]
    assert best == [False, True, False, False, True]


def saves(state: RunState, step: int) -> None:
    """Save a checkpoint of a run that has trained on no image since the last one."""
    state._cursor.done = step
    state.save(EpochMeter(torch.device("cpu"), rank=0, world_size=1, node="").record, None)


@pytest.mark.parametrize("part", ["optimizer", "ema"])
def test_moments_and_averages_that_are_infinite_are_never_saved(part: str, tmp_path: Path) -> None:
    state, model, ema = state_of(tmp_path), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    statistics = RunningStatistics(model, micro_batches=1, all_micro_batches=1)
    state.keep(model, statistics, {"optimizer": optimizer, "ema": ema})
    saves(state, 1)
    bad = ema.weight if part == "ema" else optimizer.state[model.weight]["exp_avg_sq"]
    with torch.no_grad():
        bad[0, 1] = float("inf")
    state.add_epoch({"epoch": 0, "step": 2, "validation": None})
    with pytest.raises(DivergedError, match=mentioning(f"{part} step 2 1")):
        saves(state, 2)
    assert folder_of(tmp_path).rows("epochs.jsonl") == []
    assert folder_of(tmp_path).folders() == ["checkpoint_000000001"]


def test_a_run_ends_at_the_next_step_after_it_has_diverged(tmp_path: Path) -> None:
    """Where the step does not wait for the checkpoint, a notice raises its error, and so does the end of the run."""
    store = CheckpointStore(folder_of(tmp_path), LocalSession(folder_of(tmp_path)).worker, print)
    found = threading.Event()

    def diverged() -> None:
        found.wait()
        raise DivergedError("not finite")

    store.save(1, {}, before_writing=diverged)
    found.set()
    for ending in (store.wait, store.finish):
        with pytest.raises(DivergedError, match="not finite"):
            ending()
    assert isinstance(store.error, DivergedError)
    assert not folder_of(tmp_path).folders()
