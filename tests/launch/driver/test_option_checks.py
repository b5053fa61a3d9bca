"""Warnings about options of a start: what an epoch of few global batches does not get."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.option_checks import warnings_of
from raydali.launch.driver.placement import Placement
from raydali.launch.options import LaunchOptions
from tests.support.messages import mentions


def warned(options: LaunchOptions, samples: int, workers: int) -> list[str]:
    placement = Placement(workers, workers, cpus=1, gpu=False, reachable=workers)
    return [*warnings_of(options, placement, Cluster({"a": (64, 0)}, {}), samples, None, own=False)]


@pytest.mark.parametrize(
    ("batch_size", "size", "samples", "workers", "given"),
    [
        (32, 512, 528, 1, {"--global-batch-size": 256}),
        (32, 512, 1023, 4, {"--global-batch-size": 384}),
        (256, 512, 528, 2, {"--batch-size": 132, "--global-batch-size": 264}),
        (64, 64, 64, 1, {"--batch-size": 32, "--global-batch-size": 32}),
    ],
)
def test_epochs_of_fewer_than_two_steps_are_told(
    batch_size: int, size: int, samples: int, workers: int, given: dict[str, int]
) -> None:
    options = LaunchOptions(batch_size=batch_size, global_batch_size=size, epochs=3)
    (warning,) = warned(options, samples, workers)
    assert mentions(warning, f"{size} {samples:,}") and len(warning) <= 160
    advised = re.findall(r"(--[a-z-]+) (\d+)", warning)
    assert {name: int(value) for name, value in advised} == given
    changed = replace(
        options,
        batch_size=given.get("--batch-size", batch_size),
        global_batch_size=given["--global-batch-size"],
    )
    assert not warned(changed, samples, workers)
    ends = [changed.stream(samples).end_step(epoch) for epoch in range(-1, 3)]
    assert all(before < after for before, after in pairwise(ends))


def test_two_steps_or_more_are_not_warned_of() -> None:
    assert not warned(LaunchOptions(batch_size=8, global_batch_size=16), 32, 2)
    assert not warned(LaunchOptions(batch_size=1, global_batch_size=2), 3, 2)  # there is nothing smaller
