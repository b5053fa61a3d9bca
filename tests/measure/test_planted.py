"""The verdict on real runs in which one thing is wrong: each is named, and none where nothing is."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydali.measure.verdict import verdict
from tests.support import planted
from tests.support.planted import CONFIG, SLOW_STEPS, Plant

pytestmark = pytest.mark.slow
BIG = (1600, 1064)
ATTEMPTS = 3
"""The machine may be busy with others: what they take is no part of a case."""


def without_host(line: dict[str, Any]) -> dict[str, Any]:
    """The line as it were if nothing were known of other processes: of a machine that tests share with others."""
    unknown = ("cpu", "cpu_queued", "helpers", "helpers_queued", "host_busy", "host_idle")
    return line | {"ranks": [rank | {f"{name}_seconds": None for name in unknown} for rank in line["ranks"]]}


def run(
    folder: Path,
    world_size: int,
    plant: Plant,
    config: dict[str, Any],
    data: dict[str, Any],
    right: Callable[[dict[str, Any]], bool],
    *,
    burners: int = 0,
) -> dict[str, Any]:
    """The last line of such a run, or of another like it, should the machine have been too busy for it to be right."""
    pictures = planted.pictures(folder / "data", **data)
    line: dict[str, Any] = {}
    for attempt in range(ATTEMPTS):
        with planted.burners(burners) if burners else nullcontext():
            *_, line = planted.lines(world_size, plant, replace(CONFIG, **config), pictures, folder / str(attempt))
        if right(line):
            break
    return line


def named(line: dict[str, Any]) -> tuple[str, str]:
    found = verdict(without_host(line))
    assert found is not None
    return found.kind, found.cause


PLANTED = [
    pytest.param(1, planted.nothing, SLOW_STEPS, {}, "step-bound", id="healthy"),
    pytest.param(2, planted.slow_reads, {}, {"train": 480}, "storage", id="slow reads"),
    pytest.param(2, planted.slow_rank_1, SLOW_STEPS, {"train": 480}, "straggler", id="a slow rank"),
    pytest.param(2, planted.nothing, SLOW_STEPS, {"train": 480}, "step-bound", id="healthy on 2"),
    pytest.param(3, planted.nothing, SLOW_STEPS, {"train": 480}, "step-bound", id="healthy on 3"),
    pytest.param(1, planted.nothing, {"model": "resnet18"}, {"train": 800}, "step-bound", id="slow model"),
    pytest.param(2, planted.nothing, SLOW_STEPS | {"loader": "synthetic"}, {}, "step-bound", id="no loader"),
    pytest.param(1, planted.slow_reads, {}, {"train": 320}, "storage", id="slow reads on 1"),
    pytest.param(1, planted.slow_reads_one_by_one, {"loader": "torch"}, {}, "storage", id="slow reads, torch"),
    pytest.param(1, planted.nothing, {}, {"size": BIG}, "cpu decode", id="too few threads"),
    pytest.param(2, planted.nothing, {}, {"size": BIG}, "cpu decode", id="too few threads on 2"),
    pytest.param(1, planted.nothing, {"loader": "torch"}, {"size": BIG}, "cpu decode", id="too few, torch"),
    pytest.param(1, planted.slow_python, {}, {}, "python", id="slow Python"),
    pytest.param(2, planted.slow_python, {}, {}, "python", id="slow Python on 2"),
    pytest.param(1, planted.slow_inputs, {}, {}, "python", id="slow Python before reading"),
    pytest.param(3, planted.slow_rank_1, {}, {"train": 480}, "straggler", id="a slow rank of 3"),
    pytest.param(2, planted.slow_reads_of_rank_1, {}, {"train": 640}, "straggler", id="a slow disk"),
    pytest.param(3, planted.slow_reads_of_rank_1, {}, {"train": 960}, "straggler", id="a slow disk of 3"),
    pytest.param(1, planted.slow_checkpoints, {"checkpoint_every": 4}, {}, "checkpoint", id="slow checkpoints"),
    pytest.param(2, planted.slow_checkpoints, {}, {"train": 480}, "checkpoint", id="slow checkpoints on 2"),
    pytest.param(1, planted.nothing, {"epochs": 4}, {"train": 32, "val": 64}, "short epochs", id="tiny epochs"),
    pytest.param(2, planted.nothing, {"epochs": 4}, {"train": 64, "val": 64}, "short epochs", id="tiny epochs on 2"),
    pytest.param(1, planted.nothing, SLOW_STEPS, {"val": 900}, "validation", id="much validation"),
    pytest.param(2, planted.nothing, SLOW_STEPS, {"val": 900, "train": 352}, "validation", id="validation on 2"),
    pytest.param(2, planted.slow_network, SLOW_STEPS, {}, "communication", id="slow network"),
    pytest.param(
        1, planted.slow_first_step, {"epochs": 1, "ceiling": False}, {"train": 320}, "compile", id="slow first step"
    ),
    pytest.param(2, planted.slow_start, {"epochs": 1}, {"train": 480}, "start-up", id="slow start"),
    pytest.param(
        2, planted.slow_start_of_rank_1, {"epochs": 1}, {"train": 480}, "start-up", id="slow start of one rank"
    ),
    pytest.param(3, planted.slow_checkpoints, {}, {"train": 480}, "checkpoint", id="slow checkpoints on 3"),
]


@pytest.mark.parametrize(("world_size", "plant", "config", "data", "cause"), PLANTED)
def test_what_is_planted_is_named(
    tmp_path: Path, world_size: int, plant: Plant, config: dict[str, Any], data: dict[str, Any], cause: str
) -> None:
    line = run(tmp_path, world_size, plant, config, data, lambda line: named(line)[1] == cause)
    assert named(line)[1] == cause, line
    assert sum(line["costs"].values()) < 1.1, line
    if cause == "straggler":
        found = verdict(without_host(line))
        assert found is not None and found.text.startswith("straggler, rank 1: ")
        assert ("its loader" in found.text) == (plant is planted.slow_reads_of_rank_1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_that_take_the_cores_are_told_from_all_else(tmp_path: Path, world_size: int) -> None:
    line = run(
        tmp_path,
        world_size,
        planted.nothing,
        SLOW_STEPS,
        {"train": 128},
        lambda line: "other processes used" in line["verdict"],
        burners=4,
    )
    assert line["verdict"].startswith("CPU contention: other processes used ")
