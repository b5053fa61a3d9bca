"""Options of a start: what an epoch of few global batches does not get, and micro-batches of one sample."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jobs import detection, imagenet, segmentation, video
from raydali.errors import UsageError
from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.launcher import launch
from raydali.launch.driver.option_checks import check, warnings_of
from raydali.launch.driver.placement import Placement
from raydali.launch.driver.starting_weights import check_one_sample
from raydali.options.defaults import resolve
from raydali.options.every_job import TrainingOptions
from raydali.report.console import Console
from tests.support.messages import mentioning, mentions


def warned(options: TrainingOptions, samples: int, workers: int) -> list[str]:
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
    options = TrainingOptions(batch_size=batch_size, global_batch_size=size, epochs=3)
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
    assert not warned(TrainingOptions(batch_size=8, global_batch_size=16), 32, 2)
    assert not warned(TrainingOptions(batch_size=1, global_batch_size=2), 3, 2)  # there is nothing smaller


SEGMENTER = "deeplabv3_mobilenet_v3_large"
"""Its pooling branch has a BatchNorm on maps of 1x1, at any image size."""


def one_sample_alone(job: Any, given: dict[str, Any]) -> None:
    options = resolve(replace(job.JOB.demo, **given), {})
    check_one_sample(job.JOB, replace(options, batch_size=1), job.open_data(options))


@pytest.mark.parametrize(
    ("job", "given", "remedy"),
    [
        (segmentation, {"model": SEGMENTER}, "--batch-size 2"),
        (imagenet, {"model": "resnet18", "global_batch_size": 9}, "--batch-size 3"),
        (
            imagenet,  # in later epochs alone
            {"model": "resnet18", "image_size": "64:32@2-8", "resize_size": 64, "global_batch_size": 1},
            "--batch-size 2 --global-batch-size 2",
        ),
        pytest.param(
            *(detection, {"model": "ssdlite320_mobilenet_v3_large", "image_size": 320}, "--batch-size 2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(video, {"model": "r3d_18", "image_size": 16, "resize_size": 16}, "--batch-size 2"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_batch_norm_of_one_value_is_known_before_the_start(job: Any, given: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--batch-size 1 BatchNorm at least 2 {remedy}")):
        one_sample_alone(job, given)


@pytest.mark.parametrize(
    ("job", "given"),
    [
        (imagenet, {"model": "resnet18", "freeze": "(?!fc)"}),
        (imagenet, {"model": "resnet18", "image_size": 64, "resize_size": 64}),
        (segmentation, {}),
    ],
)
def test_networks_without_such_a_batch_norm_take_one_sample(job: Any, given: dict[str, Any]) -> None:
    one_sample_alone(job, given)


def test_nothing_is_written_of_a_run_with_a_batch_norm_of_one_value(tmp_path: Path) -> None:
    options = replace(segmentation.SHAPES, model=SEGMENTER, batch_size=1, name="run", storage=str(tmp_path))
    with pytest.raises(UsageError, match=mentioning("--batch-size 1 2")):
        launch(segmentation.JOB, options, Console())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "workers", "remedy"),
    [
        ({"shard": 3, "workers": "4"}, (4, 4), "--shard 3 4 workers a number that does"),
        ({"shard": 2}, (3, 3), "--shard 2 3 workers a number that does"),
        ({"shard": 2, "workers": "2:4"}, (2, 4), "--shard 2 a fixed number of workers --workers 2:4"),
        ({"shard": "all", "optimizer": "lamb"}, (2, 2), "--shard lamb sgd or adamw"),
        ({"shard": 2, "optimizer": "muon"}, (2, 2), "--shard muon sgd or adamw"),
    ],
)
def test_what_cannot_be_sharded_is_refused(options: dict[str, Any], workers: tuple[int, int], remedy: str) -> None:
    config = imagenet.Config(batch_size=8, global_batch_size=8 * workers[1], **options)
    with pytest.raises(UsageError, match=mentioning(remedy)):
        check(config, 1000, Placement(*workers, cpus=1, gpu=False, reachable=workers[1]))
    check(replace(config, shard=None), 1000)
    if config.workers is not None or config.shard == "all":
        with pytest.raises(UsageError, match=mentioning(remedy)):
            check(config, 1000)  # before anything is started


def test_all_other_sharding_is_allowed() -> None:
    for shard, workers in (("all", (1, 5)), (2, (4, 4)), (4, (4, 4))):
        options: dict[str, Any] = {"shard": shard}
        config = imagenet.Config(batch_size=8, global_batch_size=8 * workers[1], **options)
        check(config, 1000, Placement(*workers, cpus=1, gpu=False, reachable=workers[1]))
