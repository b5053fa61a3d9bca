"""--profile-steps: a trace a rank, with the stages named."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.imagenet import Config, Data, train
from raydali.errors import UsageError
from raydali.run.folder import RunFolder
from raydali.run.messages import RankWarning
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank
from tests.support.messages import mentions
from tests.support.ranks import LocalSession, folder_of, run_ranks

STAGES = {"loader_wait", "step", "exchange", "loop", "validation", "checkpoint"}
OF_STEPS = {"loader_wait", "step", "loop"}  # the exchange is a part of the step, with no name of its own


@pytest.mark.parametrize(
    ("asked", "found", "stages"),
    [
        pytest.param("0:2", "0-1", OF_STEPS, marks=pytest.mark.slow),
        ("8:60", "8-8", OF_STEPS | {"validation", "checkpoint"}),
    ],
)
def test_each_rank_writes_what_it_did_in_these_steps(tmp_path: Path, asked: str, found: str, stages: set[str]) -> None:
    config = replace(SHORT, batch_size=48, name="run", profile_steps=asked)
    folder = folder_of(tmp_path)
    run_ranks(2, train_rank, train, config, few_digits(tmp_path / "digits"), folder)
    for rank in (0, 1):
        with gzip.open(folder.path(f"traces/steps-{found}-rank-{rank}.json.gz")) as file:
            trace = json.load(file)
        assert trace["rank"] == rank
        names = [event.get("name") for event in trace["traceEvents"]]
        first, last = map(int, found.split("-"))
        assert STAGES.intersection(names) == stages
        assert names.count("loader_wait") == names.count("step") == last + 1 - first
        assert any("convolution" in str(name) for name in names)


def warnings_of(config: Config, data: Data, folder: RunFolder) -> list[str]:
    session = LocalSession(folder)
    train(config, data, session)
    return [message.text for message in session.messages if isinstance(message, RankWarning)]


def test_steps_that_the_run_will_not_do_are_told(tmp_path: Path) -> None:
    config = replace(SHORT, epochs=1, profile_steps="100:110")
    (warnings,) = run_ranks(1, warnings_of, config, few_digits(tmp_path / "digits"), folder_of(tmp_path))
    assert len(warnings) == 1 and mentions(warnings[0], "--profile-steps 100:110 0 3")


@pytest.mark.parametrize("asked", ["5", "5:5", "7:3", "-1:3", "a:b", "0:100000"])
def test_ranges_that_are_none_are_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="--profile-steps"):
        Config(profile_steps=asked)
