"""`bench goodput`: what it counts from finished steps and kills, and a short run of two contenders."""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from raydali.bench.common.results import NOT_INSTALLED, evaluate
from raydali.bench.goodput import command
from raydali.bench.goodput.command import GoodputBench
from raydali.bench.goodput.metrics import METRICS, Measured, done_again, goodput, kill_times, missing_ranks, pauses
from raydali.bench.goodput.plot import plot
from raydali.bench.goodput.recording import FinishedStep, finished_steps, newest_step
from raydali.errors import UsageError
from tests.support.messages import mentioning

PNG = b"\x89PNG\r\n\x1a\n"


def steps(rank: int, begin: int, times: list[float]) -> list[FinishedStep]:
    return [FinishedStep(at, rank, begin + i) for i, at in enumerate(times)]


RESTARTED = sorted(
    [*steps(0, 1, [100.0, 101.0, 102.0]), *steps(1, 1, [100.1, 101.1]), *steps(0, 2, [110, 111]), *steps(1, 2, [110])],
    key=lambda row: row.time,
)
"""Two ranks. Rank 1 is killed in step 3, which rank 0 finishes, and both begin again with step 2."""
RUN = Measured(RESTARTED, 111.5, [101.5], lost=4, repeated=0)


def test_kills_are_the_same_for_a_seed_and_come_about_every_so_often() -> None:
    kills = list(islice(kill_times(20.0, 7), 50))
    assert kills == list(islice(kill_times(20.0, 7), 50)) != list(islice(kill_times(20.0, 8), 50))
    assert all(abs(at - 20.0 * number) <= 5.0 for number, (at, _) in enumerate(kills, 1))
    assert len({rank % 3 for _, rank in kills}) == 3


def test_metrics_of_a_restart() -> None:
    row = evaluate(METRICS, RUN)
    assert (row["reached"], row["seconds"], row["kills"], row["lost"], row["repeated"]) == (3, 11.5, [1.5], 4, 0)
    assert row["steps_done_again"] == done_again(RESTARTED) == 2  # rank 0 did 2 and 3 twice
    assert row["pause_seconds"] == 8.0  # from step 3 to the first after the restart
    assert [step for _, step in row["progress"]] == [1, 2, 3, 2, 3]


def test_a_pause_begins_with_the_kill_and_ends_after_the_next_kill_at_the_latest() -> None:
    finished = steps(0, 1, [0.0, 1.0, 6.0, 7.0, 20.0])
    assert pauses(finished, [3.0], 21.0) == [13.0]
    assert pauses(finished, [3.0, 8.0], 21.0) == [3.0, 12.0]
    assert pauses(finished, [8.0, 9.0], 21.0) == [12.0, 11.0]
    assert pauses(finished, [20.5], 25.0) == [4.5]


def test_steps_without_a_rank() -> None:
    both = [*steps(0, 1, [1, 2, 3]), *steps(1, 1, [1, 2, 3])]
    assert missing_ranks(both, 2) == 0 and missing_ranks(both[:-1], 2) == 1
    assert missing_ranks([FinishedStep(1.0, 0, 1, participants=2), FinishedStep(1.0, 1, 1, participants=1)], 3) == 1


def test_goodput_is_relative_to_the_undisturbed_run() -> None:
    undisturbed = {"contender": "undisturbed", "reached": 100, "seconds": 30.0}
    slower, ended = ({"contender": "ray", "reached": reached, "seconds": 60.0} for reached in (100, 50))
    assert goodput(slower, [undisturbed, slower]) == 0.5 and goodput(ended, [undisturbed, ended]) == 0.25
    assert goodput(slower, [slower]) is None and goodput(slower | {"seconds": None}, [undisturbed]) is None


def test_rows_that_ranks_have_written(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    rows = "".join(f"{1764000000 + i}.25 1 {i} 0\n" for i in range(1, 100))
    (tmp_path / "12").write_text(rows + "1764000100.25 1 10")  # of step 100
    (tmp_path / "13").write_text("1764000000.5 0 1 3\n")
    assert newest_step(tmp_path) == 99
    found = finished_steps(tmp_path)
    assert len(found) == 100 and found[0] == FinishedStep(1764000000.5, 0, 1, 3)


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = {"contender": "torchft", "error": NOT_INSTALLED, "goodput": None} | dict.fromkeys(METRICS)
    row = {"contender": "ray", "error": None, "goodput": 0.5} | evaluate(METRICS, RUN)
    settings = {"workers": 2, "kill_every": 20.0}
    result = {"command": "bench goodput", "machine": {"cpus": 2}, "settings": settings, "rows": [row, missing]}
    command._show_table(result)
    header, _, of_ray, of_torchft = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(header[-len(of_ray) + 1 :], of_ray[1:], strict=True))
    assert (cells["Seconds"], cells["Goodput"], cells["Steps done again"]) == ("11.5", "0.50", "2")
    assert "pip install torchft" in of_torchft[1]
    plot(result, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "--steps 1 0"),
        ({"workers": 17}, "--workers 16 17"),
        ({"kill_every": 0.0}, "--kill-every 0"),
        ({"contenders": "ray,slurm"}, "--contenders slurm undisturbed,ray"),
        ({"json": "/nowhere/a.json"}, "--json /nowhere/a.json"),
    ],
)
def test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        command.main(replace(GoodputBench(), **changed))


def test_options_are_cheap_to_import() -> None:
    slow = "{'torch', 'ray', 'nvidia', 'matplotlib'}"
    code = f"import sys, raydali.bench.goodput.command; assert not {slow} & {{*sys.modules}}"
    run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("contender", "steps"), [("raydali-in-place", 400), ("ray", 200)])
def test_a_run_with_kills(tmp_path: Path, contender: str, steps: int) -> None:
    options = GoodputBench(
        contenders=contender,
        workers=3,
        steps=steps,
        batch_size=16,
        image_size=32,
        checkpoint_every=20,
        kill_every=8.0,
        json=str(tmp_path / "goodput.json"),
    )
    (row,) = command.main(options)["rows"]
    assert json.loads((tmp_path / "goodput.json").read_text())["rows"][0]["contender"] == contender
    assert row["kills"] and (row["lost"], row["repeated"]) == (0, 0)
    assert row["progress"][-1][1] == steps
    assert row["steps_done_again"] > 0 or contender != "ray"
