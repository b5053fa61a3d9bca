"""Fine-tuning from trained weights: the same on any number of workers, a resume without the weights, frozen layers."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jobs import detection, restoration, segmentation
from jobs.imagenet import Data, build_model, train
from raydali.data.index.source import classes_of
from raydali.training.weights.matching import MatchedWeights, match
from raydali.training.weights.reading import read_weights
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.ranks import Stopped, folder_of, run_ranks

CLASSES = tuple(map(str, range(10)))
CONFIG = replace(SHORT, optimizer="adamw", learning_rate=0.01, freeze=r"[01]\.", layer_decay=0.8, head_lr_scale=3.0)
"""The first convolution and its norm are frozen."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> MatchedWeights:
    """Of a network for 7 classes, whose statistics are unlike those of a new one."""
    torch.manual_seed(7)
    model = build_model(CONFIG, 7)
    with torch.no_grad():
        model(torch.rand(64, 3, 32, 32))
    file = tmp_path_factory.mktemp("weights") / "digits.safetensors"
    save_file(model.state_dict(), file)
    return match(read_weights(str(file), "digits"), partial(build_model, CONFIG), 10, CLASSES)


in_double = partial(train_rank_in_double, train)


@pytest.mark.slow
def test_it_does_not_depend_on_workers_or_cuts(tmp_path: Path, digits: Data, weights: MatchedWeights) -> None:
    folders = [folder_of(tmp_path, f"on-{world_size}") for world_size in (1, 2, 3)]
    states: list[dict[str, Any]] = [
        run_ranks(world_size, in_double, CONFIG, digits, folder, None, weights)[0]
        for world_size, folder in enumerate(folders, 1)
    ]
    cut = folder_of(tmp_path, "cut")
    with pytest.raises(Stopped):
        run_ranks(2, in_double, replace(CONFIG, checkpoint_every=2), digits, cut, 8, weights)
    states.append(run_ranks(3, in_double, CONFIG, digits, cut)[0])  # without the weights

    alone, rows = states[0], folders[0].rows("epochs.jsonl")
    for state, folder in zip(states, [*folders, cut], strict=True):
        for row, other in zip(rows, folder.rows("epochs.jsonl"), strict=True):
            assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)
            assert other["validation"]["loss"] == pytest.approx(row["validation"]["loss"], rel=1e-6)
        for name, tensor in alone.items():
            np.testing.assert_allclose(state[name], tensor, rtol=1e-7, atol=1e-9, err_msg=name)

    assert set(weights.new_head) == {"11.weight", "11.bias"} and weights.earlier_classes == 7
    frozen = {name for name in alone if name.split(".")[0] in ("0", "1")}
    assert {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"} < frozen
    for name, value in weights.state.items():
        assert np.array_equal(alone[name], value.numpy()) is (name in frozen), name


@pytest.mark.parametrize(
    ("job", "demo", "pattern"),
    [
        pytest.param(
            detection,
            replace(detection.SHAPES, image_size=64, head_lr_scale=3.0),
            "backbone",
            marks=pytest.mark.slow,
        ),
        (
            restoration,
            replace(restoration.BLURRED, channels=8, blocks=1, crop_size=16, test_size=(16, 16)),
            r"layers\.1\.",
        ),
        (segmentation, replace(segmentation.SHAPES, crop_size=32, base_size=40, layer_decay=0.8), r"levels\.[01]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_jobs_start_from_weights_and_freeze(job: Any, demo: Any, pattern: str, tmp_path: Path) -> None:
    config = replace(demo, epochs=1, batch_size=4, global_batch_size=4, ceiling=False, freeze=pattern)
    data = job.open_data(config)
    data = Data(*(source.drop(range(8, len(source))) for source in (data.train, data.val)))
    classes = classes_of(data.train)
    torch.manual_seed(7)
    build = partial(job.build_model, config)
    torch.save(build(len(classes) + 2).state_dict(), tmp_path / "weights.pt")
    weights = match(read_weights(str(tmp_path / "weights.pt"), ""), build, len(classes), classes)
    assert bool(weights.new_head) is (job is not restoration) and not set(weights.missing) - set(weights.new_head)
    trained = run_ranks(1, partial(train_rank, job.train), config, data, folder_of(tmp_path), None, weights)[0]
    same = {name for name, value in weights.state.items() if np.array_equal(trained[name], value.numpy())}
    assert same == {name for name in weights.state if re.match(pattern, name)}
