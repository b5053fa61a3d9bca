"""Options that every job has: ranges of workers and what is refused at once."""

from typing import Any

import pytest

from raydali.errors import UsageError
from raydali.options.every_job import TrainingOptions
from tests.support.messages import mentioning


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(None, None), ("1", (1, 1)), ("4", (4, 4)), ("2:8", (2, 8)), ("3:3", (3, 3)), ("1:64", (1, 64))],
)
def test_ranges_of_workers(workers: str | None, expected: tuple[int, int] | None) -> None:
    assert TrainingOptions(workers=workers).worker_range == expected


@pytest.mark.parametrize("workers", ["x", "", ":", ":4", "2:x", "2:3:4", "2-4", "1.5", "2:8.0"])
def test_what_is_no_range_of_workers(workers: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--workers {workers} 4 2:8")):
        TrainingOptions(workers=workers)


@pytest.mark.parametrize("workers", ["0", "-1", "0:4", "-2:2", "3:2", "4:0"])
def test_ranges_without_workers(workers: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--workers {workers} 1")):
        TrainingOptions(workers=workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus_per_worker": 0}, "--cpus-per-worker 1 0"),
        ({"cpus_per_worker": -3}, "--cpus-per-worker 1 -3"),
        ({"max_failures": -2}, "--max-failures -1 -2"),
        ({"shard": 1}, "--shard 1 2 leave out over all"),
        ({"shard": 0}, "--shard 0 2 leave out over all"),
        ({"shard": "all", "on_bad_loss": "skip"}, "--shard --on-bad-loss skip warn stop"),
        ({"shard": "all", "precision": "fp16"}, "--shard fp16 bf16 fp32"),
        ({"cache": "/x:full"}, "--cache /x:full DIR:SIZE /mnt/cache:500G"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        TrainingOptions(**options)


def test_fused_layers_need_compilation() -> None:
    with pytest.raises(UsageError, match=mentioning("--fused --compile")):
        TrainingOptions(fused=True, compile=False)
    assert TrainingOptions(fused=True).compile is None


def test_bounds_themselves_are_fine() -> None:
    for max_failures in (-1, 0, 7):
        assert TrainingOptions(cpus_per_worker=1, max_failures=max_failures).max_failures == max_failures


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [
        ({}, 2700),
        ({"hang_timeout": 3600}, 5400),
        ({"hang_timeout": 10, "start_timeout": 60}, 90),
        ({"hang_timeout": 0}, 86400),
        ({"start_timeout": 0}, 86400),
    ],
)
def test_process_groups_wait_longer_than_the_driver(timeouts: dict[str, Any], expected: float) -> None:
    assert TrainingOptions(**timeouts).group_timeout.total_seconds() == expected


def test_checkpoints_of_every_nth_epochs_end_are_kept() -> None:
    options = TrainingOptions(epochs=6, batch_size=10, global_batch_size=10, keep_epochs=2)
    kept = options.kept_steps(100)
    assert [step for step in range(61) if kept(step)] == [20, 40, 60]
    assert not any(map(TrainingOptions(epochs=6, batch_size=10, global_batch_size=10).kept_steps(100), range(61)))
