"""A job of one's own whose loss is NaN for one picture: what its run does, on 1 and 2 ranks, as --on-bad-loss says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydali.run.events import BadLoss
from raydali.run.find import KEPT, newest_first, step_of
from raydali.run.folder import RunFolder
from raydali.training.checkpoint_file import tensors_in
from tests.support.copied_jobs import changed_copy
from tests.support.messages import mentions
from tests.support.planted_pictures import STANDARDISED, planted_digits, planted_run, state_after, steps_of
from tests.support.quick import first_quick
from tests.support.ranks import Stopped

EARLY: dict[str, Any] = {"checkpoint_every": 1, "ema_decay": 0.9, "optimizer": "adamw", "learning_rate": 0.001}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_copy("imagenet", STANDARDISED, tmp_path_factory.mktemp("job"))


@first_quick("world_size", [2, 1])
def test_skip_leaves_the_batch_out_of_all_that_is_learned(
    tmp_path: Path, root: Path, job: Path, world_size: int
) -> None:
    (bad, *_) = steps_of(root, "uniform")
    options: dict[str, Any] = {"on_bad_loss": "skip", "precision": "fp32", **EARLY}
    with pytest.raises(Stopped):
        planted_run(job, root, tmp_path, workers=world_size, stop_at=bad + 2, **options)
    folder = RunFolder(str(tmp_path), "run")
    before, after = state_after(folder, bad), state_after(folder, bad + 1)
    for part in ("model", "optimizer", "ema"):
        pairs = zip(tensors_in(before[part]), tensors_in(after[part]), strict=True)
        differ = [now for was, now in pairs if not torch.equal(was, now)]
        assert [tensor.tolist() for tensor in differ] == (
            [after["ema"]["n_averaged"].tolist()] if part == "ema" else []
        )


def test_a_run_with_skip_ends_as_well_on_2_ranks_as_on_1(tmp_path: Path, root: Path, job: Path) -> None:
    options: dict[str, Any] = {"on_bad_loss": "skip", "precision": "fp64", "learning_rate": 0.01}
    rows, weights = [], []
    for world_size in (1, 2):
        storage = tmp_path / str(world_size)
        found = planted_run(job, root, storage, workers=world_size, **options)
        steps = [row["step"] for row in found[0][0]]
        assert steps == steps_of(root, "uniform") and all(row["left_out"] for row in found[0][0])
        assert found[-1][0] == (found[0][0] if world_size == 1 else []), "rank 0 alone tells it"
        rows.append(RunFolder(str(storage), "run").rows("epochs.jsonl"))
        weights.append(found[0][1])
    for row, other in zip(*rows, strict=True):
        assert row["left_out"] == other["left_out"] == 96
        assert np.isfinite(row["loss"]) and other["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert other["validation"]["loss"] == pytest.approx(row["validation"]["loss"], rel=1e-6)
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(weights[1][name], tensor, rtol=1e-6, atol=1e-9)


def test_stop_ends_all_ranks_with_the_step_the_command_and_the_checkpoint(
    tmp_path: Path, root: Path, job: Path
) -> None:
    (bad, *_) = steps_of(root, "uniform")
    with pytest.raises(AssertionError) as raised:
        planted_run(job, root, tmp_path, workers=2, on_bad_loss="stop", **EARLY)
    folder = RunFolder(str(tmp_path), "run")
    text = str(raised.value)
    assert mentions(text, f"{bad} nan --step skip checkpoint_{bad:09d}") and f"replay {folder} " in text
    assert step_of(newest_first(folder)[0]) == bad
    ((rows, _),) = planted_run(job, root, tmp_path, on_bad_loss="skip", **EARLY)  # as the message says
    assert [row["step"] for row in rows] == steps_of(root, "uniform")


@pytest.mark.slow
def test_skip_ends_a_run_in_which_no_step_is_good(tmp_path: Path, root: Path) -> None:
    loss = "criterion(trained(images), labels)"
    job = changed_copy("imagenet", {loss: f"{loss} * float('nan')"}, tmp_path)
    options: dict[str, Any] = {"batch_size": 6, "global_batch_size": 6, "epochs": 2}
    with pytest.raises(AssertionError) as raised:
        planted_run(job, root, tmp_path, on_bad_loss="skip", **options)
    assert mentions(str(raised.value), "64 steps in a row step 63 nan --name")


@pytest.mark.slow
def test_stop_names_what_goes_on_if_the_run_is_sharded(tmp_path: Path, root: Path, job: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        planted_run(job, root, tmp_path, workers=2, on_bad_loss="stop", shard="all")
    assert mentions(str(raised.value), "--on-bad-loss skip without --shard")


@pytest.mark.slow
def test_by_default_a_jump_is_told_and_the_checkpoint_before_it_is_kept(tmp_path: Path, root: Path) -> None:
    changes = {"criterion(trained(images), labels)": "criterion(trained(images), labels) * jump(images)"}
    jump = """def jump(images):
    rows = images.flatten(1)
    return 1 + 999 * (rows.amax(1) == rows.amin(1)).any()


"""
    jumping = changed_copy("imagenet", {**changes, "def build_model(": f"{jump}def build_model("}, tmp_path)
    # The weights hardly change: what becomes of them after a jump depends on the processor.
    options: dict[str, Any] = {"checkpoint_every": 4, "batch_size": 8, "global_batch_size": 8, "learning_rate": 1e-6}
    early, bad = steps_of(root, "uniform", **options)
    assert early < 32, "the first steps are judged less strictly"
    (((row,), _),) = planted_run(jumping, root, tmp_path, **options)
    before = bad // 4 * 4
    assert (row["step"], row["left_out"], row["checkpoint"]) == (bad, False, before)
    assert row["loss"] > 100 and mentions(row["command"], f"raydali replay --step {bad}")
    steps = [step_of(name) for name in newest_first(RunFolder(str(tmp_path), "run"))]
    assert before in steps[KEPT:] and len(steps) == KEPT + 1


def test_the_event_of_a_loss_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    facts: dict[str, Any] = {"why": "its loss is nan", "left_out": False, "checkpoint": 0, "command": "raydali replay"}
    folder.append("events.jsonl", BadLoss(step=3, loss=float("nan"), gradient_norm=1.0, **facts).row())
    assert folder.rows("events.jsonl")[0]["loss"] is None
