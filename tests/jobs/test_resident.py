"""A run with `--loader resident` is the run with `--loader torch`, also after a resume on another number of workers."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jobs.imagenet import train
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank_in_double
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole


@pytest.mark.slow
def test_a_run_and_its_resume_are_those_of_the_torch_loader(tmp_path: Path) -> None:
    digits = few_digits(tmp_path / "digits")
    config = replace(SHORT, random_area=(1.0, 1.0), flip_probability=0.5, augment="shift:4", checkpoint_every=3)
    in_double = partial(train_rank_in_double, train)
    whole, cut = folder_of(tmp_path, "whole"), folder_of(tmp_path, "cut")
    expected = run_ranks(1, in_double, replace(config, loader="torch"), digits, whole)[0]
    resident = replace(config, loader="resident")
    with pytest.raises(Stopped):
        run_ranks(2, in_double, resident, digits, cut, 4)  # checkpoint at 3
    weights = run_ranks(1, in_double, resident, digits, cut)[0]
    assert_whole(cut, config.stream(len(digits.train)))
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-9 * max(1, np.abs(value).max()))
    rows, others = whole.rows("epochs.jsonl"), cut.rows("epochs.jsonl")
    assert [row["validation"]["top1"] for row in others] == [row["validation"]["top1"] for row in rows]
    assert all(row["loader_wait_seconds"] is not None for row in others)
