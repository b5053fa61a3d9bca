"""Promise 2: the run does not depend on the number of workers; and promise 1 across cuts, on plain gloo processes."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import Data, train
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.run.folder import RunFolder
from tests.support.digits import SHORT, digits_data, few_digits
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole, read_samples

CONFIG = replace(SHORT, learning_rate=0.01)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return few_digits(tmp_path_factory.mktemp("digits"))


in_single = partial(train_rank, train)
in_double = partial(train_rank_in_double, train)


def distance(weights: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    """The largest relative difference of a tensor; BatchNorm's running statistics are among them."""
    assert weights.keys() == others.keys()
    return max(float(np.linalg.norm(weights[name] - others[name]) / np.linalg.norm(others[name])) for name in weights)


Run = tuple[dict[str, np.ndarray], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def alone(digits: Data, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Weights and epoch records of the undisturbed run on one worker."""
    folder = folder_of(tmp_path_factory.mktemp("alone"))
    return run_ranks(1, in_double, CONFIG, digits, folder)[0], folder.rows("epochs.jsonl")


def test_losses_and_weights_are_equal_on_1_2_and_4_workers(tmp_path: Path, digits: Data, alone: Run) -> None:
    weights, rows = alone
    assert [row["images"] for row in rows] == [480, 384]
    for world_size in (2, 4):  # with equal shares, and with unequal ones; 3 resume below
        folder = folder_of(tmp_path, f"on-{world_size}")
        other_weights = run_ranks(world_size, in_double, CONFIG, digits, folder)[0]
        other_rows = folder.rows("epochs.jsonl")
        for row, other in zip(rows, other_rows, strict=True):
            assert other["world_size"] == world_size
            assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)
            assert other["validation"]["loss"] == pytest.approx(row["validation"]["loss"], rel=1e-6)
            assert other["validation"]["top1"] == row["validation"]["top1"]
            assert other["validation"]["images"] == 120
        assert distance(other_weights, weights) < 1e-9


def test_resumes_on_other_workers_lose_and_repeat_nothing(tmp_path: Path, digits: Data, alone: Run) -> None:
    config = replace(CONFIG, checkpoint_every=2)
    folder = folder_of(tmp_path)
    with pytest.raises(Stopped):
        run_ranks(2, in_double, config, digits, folder, 4)  # checkpoint at 2; steps 2 and 3 run again
    with pytest.raises(Stopped):
        run_ranks(3, in_double, config, digits, folder, 8)  # past the first epoch's line, at 5
    weights = run_ranks(1, in_double, config, digits, folder)[0]

    assert_whole(folder, config.stream(len(digits.train)))
    assert set(read_samples(folder)["rank"].to_pylist()) == {0, 1, 2}
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == [0, 1]
    assert [row["images"] for row in rows] == [480, 384]
    assert [rank["world_size"] for rank in rows[0]["ranks"]] == [2, 2, 3, 3, 3]

    undisturbed, undisturbed_rows = alone
    assert rows[1]["loss"] == pytest.approx(undisturbed_rows[1]["loss"], rel=1e-6)
    assert distance(weights, undisturbed) < 1e-9


@pytest.mark.slow
def test_a_run_that_was_stopped_after_an_epoch_goes_on_on_its_course(tmp_path: Path, digits: Data, alone: Run) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, in_double, replace(CONFIG, stop_after=1), digits, folder)
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [0]
    weights = run_ranks(3, in_double, CONFIG, digits, folder)[0]
    assert_whole(folder, CONFIG.stream(len(digits.train)))
    undisturbed, rows = alone
    for row, other in zip(rows, folder.rows("epochs.jsonl"), strict=True):
        assert other["learning_rate"] == row["learning_rate"]
    assert distance(weights, undisturbed) < 1e-9


RECIPE: dict[str, Any] = {
    "model": "tests.support.digits:residual_digits",
    "drop_path": 0.3,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "ema_decay": 0.9,
    "ema_warmup": True,
    "min_learning_rate": 1e-4,
    "clip_grad": 0.05,
}
BCE: dict[str, Any] = {"loss": "bce", "bce_threshold": 0.2}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"optimizer": "sgd", "schedule": "poly:1", "no_decay": "norms", **BCE}, 1e-9),
        pytest.param({"optimizer": "muon", "schedule": "step:1,0.5"}, 1e-4, marks=pytest.mark.slow),  # bf16
        pytest.param({"optimizer": "adamw", "schedule": "poly:2"}, 1e-9, marks=pytest.mark.slow),
        pytest.param({"optimizer": "lamb", "warmup_start": 0.1, **BCE}, 1e-9, marks=pytest.mark.slow),
        pytest.param({"optimizer": "lars", "learning_rate": 1.0}, 1e-9, marks=pytest.mark.slow),
    ],
    ids=lambda changes: changes["optimizer"] if isinstance(changes, dict) else "",
)
@pytest.mark.slow
def test_recipes_train_alike_on_1_to_3_workers_and_across_resumes(
    tmp_path: Path, digits: Data, changes: dict[str, Any], bound: float
) -> None:
    """Average weights are validated, so that they are compared, too; several workers compute activations again."""
    config = replace(CONFIG, **{**RECIPE, **changes})
    alone, cut = folder_of(tmp_path, "alone"), folder_of(tmp_path, "cut")
    weights = run_ranks(1, in_double, config, digits, alone)[0]
    config = replace(config, activation_checkpointing=True)
    with pytest.raises(Stopped):
        run_ranks(3, in_double, replace(config, checkpoint_every=2), digits, cut, 4)
    resumed = run_ranks(2, in_double, config, digits, cut)[0]
    assert distance(resumed, weights) < bound
    for row, other in zip(alone.rows("epochs.jsonl"), cut.rows("epochs.jsonl"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=bound)
        assert other["learning_rate"] == row["learning_rate"]
        assert other["validation"]["loss"] == pytest.approx(row["validation"]["loss"], rel=bound)


@pytest.mark.slow
def test_measuring_the_ceiling_leaves_no_trace_in_the_run(tmp_path: Path, digits: Data) -> None:
    config = replace(CONFIG, epochs=1, mixup=0.2, ema_decay=0.9, precision="bf16", checkpoint_every=2)
    runs = {}
    for ceiling in (False, True):
        folder = folder_of(tmp_path, f"ceiling-{ceiling}")
        runs[ceiling] = (
            run_ranks(2, in_single, replace(config, ceiling=ceiling), digits, folder),
            folder,
        )
    for (name, tensor), (_, other) in zip(runs[False][0][0].items(), runs[True][0][0].items(), strict=True):
        np.testing.assert_array_equal(tensor, other, err_msg=name)
    (unmeasured,), (measured,) = (folder.rows("epochs.jsonl") for _, folder in runs.values())
    assert unmeasured["ceiling_images_per_second"] is None and unmeasured["of_ceiling"] is None
    share = measured["images_per_second"] / measured["ceiling_images_per_second"]
    assert measured["of_ceiling"] == min(1, share)  # noise may make an epoch a little faster than its ceiling
    assert measured["validation"]["loss"] == unmeasured["validation"]["loss"]


@pytest.mark.slow
def test_a_resume_keeps_the_ceiling_unless_something_changed(tmp_path: Path, digits: Data) -> None:
    config = replace(CONFIG, ceiling=True, checkpoint_every=2)
    beside: dict[str, Any] = {"hang_timeout": 60.0, "checkpoint_every": 3}
    changed: dict[str, Any] = {"mixup": 0.2}
    cut = folder_of(tmp_path, "cut")
    with pytest.raises(Stopped):
        run_ranks(2, in_single, config, digits, cut, 7)
    first = cut.rows("epochs.jsonl")[0]["ceiling_images_per_second"]
    for world_size, changes, kept in ((2, beside, True), (1, {}, False), (2, changed, False)):
        folder = RunFolder(str(tmp_path), f"{world_size}-{len(changes)}")
        shutil.copytree(cut.path(), folder.path())
        run_ranks(world_size, in_single, replace(config, **changes), digits, folder)
        last = folder.rows("epochs.jsonl")[1]["ceiling_images_per_second"]
        assert first > 0 and last == (first if kept else None)


@pytest.mark.slow
def test_torch_and_dali_loaders_reach_the_same_accuracy(tmp_path: Path) -> None:
    accuracy, digits = {}, digits_data()
    for loader in ("dali", "torch"):
        folder = folder_of(tmp_path, loader)
        run_ranks(2, in_single, replace(CONFIG, epochs=6, learning_rate=0.1, loader=loader), digits, folder)
        accuracy[loader] = folder.rows("epochs.jsonl")[-1]["validation"]["top1"]
    assert accuracy["dali"] > 0.9
    assert accuracy["torch"] == pytest.approx(accuracy["dali"], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mixup": 0.2, "cutmix": 1.0, "ema_decay": 0.9, "label_smoothing": 0.1},
        {"precision": "bf16"},
        {"loader": "synthetic"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_options_train_alike_on_1_and_2_workers(tmp_path: Path, digits: Data, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, epochs=1, **changes)
    losses = []
    for world_size in (1, 2):
        folder = folder_of(tmp_path, f"on-{world_size}")
        run_ranks(world_size, in_single, config, digits, folder)
        losses.append(folder.rows("epochs.jsonl")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05 if config.precision != "fp32" else 1e-3)
    assert np.isfinite(losses).all()


def even_and_large(digits: LabeledSource) -> LabeledSource:
    """The same images with two labels: even, and at least five."""
    assert isinstance(digits, LabeledFiles)
    labels = np.stack([digits.labels % 2 == 0, digits.labels >= 5], 1).astype(np.uint8)
    return replace(digits, labels=labels, classes=("even", "large"))


@pytest.mark.slow  # tests/training/test_losses.py has the losses alone
@pytest.mark.parametrize("several", [False, True])
def test_weighted_losses_and_several_labels_on_1_to_3_workers(tmp_path: Path, digits: Data, several: bool) -> None:
    config = replace(CONFIG, epochs=1, class_weights="balanced", label_smoothing=0.1, multi_label=several, data="x")
    if several:
        digits = Data(*map(even_and_large, (digits.train, digits.val)))
    rows, weights = [], []
    for world_size in (1, 2, 3):
        folder = folder_of(tmp_path, f"on-{world_size}")
        weights.append(run_ranks(world_size, in_double, config, digits, folder)[0])
        rows += folder.rows("epochs.jsonl")
    for row, of_rank in zip(rows[1:], weights[1:], strict=True):
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
        assert distance(of_rank, weights[0]) < 1e-9
        assert row["validation"]["loss"] == pytest.approx(rows[0]["validation"]["loss"], rel=1e-6)
        for name in ("images", *(("map", "accuracy") if several else ("top1",))):
            assert row["validation"][name] == pytest.approx(rows[0]["validation"][name], rel=1e-6)
