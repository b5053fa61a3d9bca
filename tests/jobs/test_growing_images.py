"""A run whose images grow: its ceilings, its validation, its resumes inside of every size, and what is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jobs.imagenet import Config, Data, check, train
from raydali.errors import UsageError
from raydali.run.events import CeilingMeasured, Rehearsed, SizesRehearsed
from raydali.run.folder import RunFolder
from raydali.run.messages import Message
from raydali.training.models.normalized import Normalized
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank_in_double, undisturbed
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole

GROWING = replace(SHORT, learning_rate=0.01, epochs=3, image_size="32:64@0-2", val_image_size=40, resize_size=44)
"""Five steps an epoch of 32, of 64, and of 64 pixels."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return few_digits(tmp_path_factory.mktemp("digits"))


def distances(weights: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(weights[name] - others[name]) / np.linalg.norm(others[name])) for name in weights]


@pytest.mark.slow
def test_resumes_inside_of_each_size_on_other_workers(tmp_path: Path, digits: Data) -> None:
    in_double = partial(train_rank_in_double, train)
    whole, cut = folder_of(tmp_path, "whole"), folder_of(tmp_path, "cut")
    weights = run_ranks(1, in_double, GROWING, digits, whole)[0]
    config = replace(GROWING, checkpoint_every=3)
    with pytest.raises(Stopped):
        run_ranks(3, in_double, config, digits, cut, 4)  # checkpoint at 3
    with pytest.raises(Stopped):
        run_ranks(1, in_double, config, digits, cut, 8)  # past the seam of sizes, at 5
    resumed = run_ranks(2, in_double, config, digits, cut)[0]
    assert_whole(cut, config.stream(len(digits.train)))
    assert max(distances(resumed, weights)) < 1e-9
    rows, others = whole.rows("epochs.jsonl"), cut.rows("epochs.jsonl")
    assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in rows], rel=1e-6)


def measured(config: Config, data: Data, folder: RunFolder, seconds: float | None = None) -> list[Message]:
    session = LocalSession(folder)
    session.short_seconds = seconds
    with undisturbed():
        train(config, data, session)
    session.checkpoints.finish()
    return session.messages


@pytest.mark.slow  # a short run measures all sizes, too
def test_each_size_has_its_ceiling(tmp_path: Path, digits: Data) -> None:
    folder = folder_of(tmp_path)
    (messages,) = run_ranks(1, measured, replace(GROWING, ceiling=True), digits, folder)
    events = [message for message in messages if isinstance(message, Rehearsed)]
    assert [type(event) for event in events] == [Rehearsed, CeilingMeasured]
    first, second = (event.ceiling_images_per_second for event in events)
    assert first and second and second < 0.7 * first  # four times the pixels
    rows = folder.rows("epochs.jsonl")
    assert [row["ceiling_images_per_second"] for row in rows] == [first, second, second]


@pytest.mark.slow
def test_a_short_run_measures_what_all_sizes_cost(tmp_path: Path, digits: Data) -> None:
    config = replace(GROWING, ceiling=True, epochs=9, image_size="32:64@6-7")
    (messages,) = run_ranks(1, measured, config, digits, folder_of(tmp_path), 0.5)
    (sizes,) = [message for message in messages if isinstance(message, SizesRehearsed)]
    assert sizes.costs[:7] == [1.0] * 7 and 1.4 < sizes.costs[7] == sizes.costs[8]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"vit_b_16 takes images of one size, .* give 160, 192: give one"):
        check(replace(GROWING, model="vit_b_16", image_size="160:192@0-2", val_image_size=192, resize_size=None))
    with pytest.raises(UsageError, match="alexnet cannot take images of 32x32 pixels"):
        check(replace(GROWING, model="alexnet"))
    with pytest.raises(UsageError, match="--val-image-size must be at least 1, not 0"):
        replace(GROWING, val_image_size=0)
    with pytest.raises(UsageError, match="resize_size 44 is below image_size 64"):
        check(replace(GROWING, val_image_size=None))


def test_outputs_of_mirrored_images_are_averaged_in_evaluation_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    plain, mirrored = Normalized(model), Normalized(model, mirrored=True)
    images = torch.randint(256, (2, 3, 4, 4))
    assert torch.equal(mirrored(images), plain(images))
    expected = (plain(images) + plain(images.flip(3))) / 2
    torch.testing.assert_close(mirrored.eval()(images), expected)
    assert not torch.allclose(expected, plain(images))
