"""The forecast of a run from the records of a short one, on numbers that are easy to check."""

from typing import Any, Literal

import pytest

from raydali.measure.forecast import Forecast, Measured
from raydali.measure.memory import largest_batch
from raydali.options.every_job import TrainingOptions
from tests.support.rank_records import rank

GIB = 2**30
MEMORY = {"peak": 30 * GIB, "held": 6 * GIB, "others": 4 * GIB, "total": 80 * GIB}


def record(steps: int, workers: int = 1, **changed: Any) -> dict[str, Any]:
    """An epoch of steps of 0.1 s with 100 samples for each worker, of a validation and of a checkpoint of 0.5 s."""
    of_ranks = {
        "images": 100 * steps,
        "steps": steps,
        "seconds": 0.1 * steps + 0.5,
        "step_seconds": 0.1 * steps,
        "loader_wait_seconds": 0.0,
        "loader_waits": {},
        "checkpoint_seconds": 0.5,
        "exchange_seconds": 0.02 * steps if workers > 1 else None,
        "shortest_exchange_seconds": 0.02 if workers > 1 else None,
        "memory": MEMORY,
    } | changed
    return {
        "world_size": workers,
        "seconds": of_ranks["seconds"],
        "checkpoint_seconds": of_ranks["checkpoint_seconds"],
        "of_ceiling": 0.9,
        "verdict": None,
        "ceiling_images_per_second": 1100.0 * workers,
        "validation": {"seconds": 3.0, "samples": 500, "all_samples": 2500, "sample_seconds": 0.004},
        "costs": {},
        "ranks": [rank("g", rank=i, size=workers, **of_ranks) for i in range(workers)],
    }


def first(workers: int = 1) -> dict[str, Any]:
    """With a first batch of 2 s, and no checkpoint before it."""
    changed = {"first_batch_seconds": 2.0, "loader_wait_seconds": 2.0, "seconds": 4.0, "checkpoint_seconds": 0.0}
    return record(20, workers, **changed) | {"costs": {"start-up": 2 / 7}}


def forecast(*records: dict[str, Any], **changed: Any) -> Forecast:
    facts: dict[str, Any] = {
        "samples": 10_000,
        "epochs": 10,
        "batch_size": 100,
        "validations": 10,
        "checkpoint_every": 0,
        "before_placement": 5.0,
        "starting": 20.0,
        "ending": 2.0,
        "starting_joules": 2000.0,
        "watts": 360.0,
        "price": 3.6,
        "weights_bytes": 10**8,
    } | changed
    return Forecast(measured=Measured(records, 100, facts["checkpoint_every"]), **facts)


def test_a_run_takes_what_its_parts_take() -> None:
    run = forecast(first(), record(80))
    measured, row = run.measured, run.row(1, 100)
    assert (measured.start_extra_seconds, measured.step, measured.exchange) == pytest.approx((2.0, 0.1, 0.0))
    assert measured.validation(1) == pytest.approx(1.0 + 0.004 * 2500) and measured.checkpoint == pytest.approx(0.5)
    assert row["epoch_seconds"] == pytest.approx(10 + 11 + 0.5)
    assert row["run_seconds"] == pytest.approx(5 + 20 + 2 + 10 * 21.5 + 2)
    held = row["run_seconds"] - 5
    assert row["goodput"] == pytest.approx(100_000 / 1100 / held, abs=1e-4)
    assert row["cost_usd"] == pytest.approx(held / 1000, abs=1e-4)
    assert row["kwh"] == pytest.approx((2000 + 360 * (held - 20)) / 3.6e6, abs=1e-4)
    assert (row["gpus"], row["estimated"], row["bandwidth"]) == (1, False, None)


def test_images_of_other_sizes_in_later_epochs() -> None:
    costs = [1.0, 2.0, 2.0, 2.0]  # a step of the first epoch takes 0.1 s, and a mean one 0.175
    larger = record(80, seconds=16.5) | {"epoch": 1, "ceiling_images_per_second": 550.0}
    for measured in (record(80) | {"epoch": 0}, larger):
        found = Measured([first() | {"epoch": 0}, measured], 100, 0, costs)
        assert (found.step, found.ceiling) == pytest.approx((0.175, 1100 / 1.75))


def test_fewer_validations_and_more_checkpoints() -> None:
    run = forecast(first(), record(80, checkpoint_seconds=2.5, seconds=10.5), validations=3, checkpoint_every=20)
    assert run.measured.checkpoint == pytest.approx(0.5)
    assert run.row(1, 100)["run_seconds"] == pytest.approx(5 + 20 + 2 + 100 + 3 * 11 + 60 * 0.5 + 2)


def test_a_single_record_has_the_costs_of_the_start() -> None:
    assert forecast(first()).row(1, 100)["run_seconds"] == pytest.approx(5 + 20 + 2 + 100 + 110 + 2)
    never = {**first(), "validation": None, "costs": {"start-up": 0.5}}
    assert forecast(never, validations=0).row(1, 100)["run_seconds"] == pytest.approx(5 + 20 + 2 + 100 + 2)


def test_the_first_checkpoint_is_no_later_one() -> None:
    slow = record(20, checkpoint_seconds=5.0, seconds=7.0)
    assert forecast(slow, record(80)).measured.checkpoint == 0.5
    assert forecast(slow).measured.checkpoint == 0.0


def test_costs_are_of_the_run() -> None:
    """The short run saves and validates once in 8 s of steps; the run in 1000 s, or in 1 s of them."""
    saves: dict[str, Any] = {"checkpoint_seconds": 2.0, "seconds": 10.0}
    full = record(80, **saves) | {"costs": {"storage": 0.1, "checkpoint": 2 / 13, "validation": 3 / 13, "compile": 0.2}}
    for samples, steps in ((1_000_000, 100_000), (1000, 100)):
        run = forecast(first(), full, record(30, **saves), samples=samples)
        expected = {"storage": 0.1 * 13 / 8 * steps * run.measured.step, "checkpoint": 20.0, "validation": 110.0}
        assert run.costs(100) == pytest.approx(expected)


def test_a_validation_of_one_batch_grows_with_its_samples() -> None:
    one = {"seconds": 3.0, "samples": 500, "all_samples": 2500, "sample_seconds": None}
    assert forecast({**record(80), "validation": one}).measured.validation(1) == pytest.approx(15.0)
    few = {**record(80), "validation": {**one, "all_samples": 500}}
    assert forecast(few).measured.validation(1) == pytest.approx(3.0)


def test_what_the_first_validation_takes_longer_is_a_part_of_the_start() -> None:
    validation = {**first()["validation"], "seconds": 9.0}  # 6 s more than later ones
    started = {**first(), "validation": validation, "costs": {"start-up": 2 / (4 + 9)}}
    measured = forecast(started, record(80)).measured
    assert (measured.start_extra_seconds, measured.validation(1)) == pytest.approx((2.0 + 6.0, 11.0))


def test_other_numbers_of_gpus() -> None:
    one = forecast(first(), record(80))
    row = one.row(4, 400)
    assert row["estimated"] and row["bandwidth"] is None and row["images_per_second"] == pytest.approx(4000)
    assert row["epoch_seconds"] == pytest.approx(2.5 + 1.0 + 0.004 * 2500 / 4 + 0.5)
    assert one.row(1, 800)["images_per_second"] == pytest.approx(1000)
    assert one.row(4, 800)["images_per_second"] == pytest.approx(4000)
    slow = forecast(first(), record(80), bandwidth=1e9).row(4, 400)
    assert slow["images_per_second"] == pytest.approx(400 / (0.1 + 2 * 3 / 4 * 0.1), abs=0.1)
    assert slow["bandwidth"] == 1e9
    two = forecast(first(2), record(80, 2)).measured
    assert (two.step, two.exchange) == pytest.approx((0.1, 0.02))
    assert two.step_of(1, 1, 0, None) == pytest.approx(0.08)
    assert two.step_of(4, 1, 0, None) == pytest.approx(0.08 + 0.02 * (3 / 4) / (1 / 2))


@pytest.mark.parametrize(
    ("measured", "shard", "expected"),
    [
        (1, "all", {1: 34.0, 2: 28.0, 4: 25.0}),  # half of 12 GiB less, and three quarters
        (4, "all", {1: 34 + 9 + 3, 2: 34 + 3 + 1, 4: 34.0, 8: 34 - 1.5}),  # gradients of 4 GiB add to a peak only
        (4, 2, {2: 34.0, 4: 34.0, 8: 34.0}),
        (2, None, {1: 34.0, 8: 34.0}),
    ],
)
def test_memory_by_shards(measured: int, shard: int | Literal["all"] | None, expected: dict[int, float]) -> None:
    bytes_: dict[str, Any] = {"state_bytes": 12 * GIB, "weights_bytes": 4 * GIB}
    over = TrainingOptions(shard=shard).sharded_over
    run = forecast(record(80, measured), sharded_over=over, **bytes_)
    rows = {workers: run.row(workers, 100 * workers) for workers in expected}
    assert {workers: row["memory_bytes"] / GIB for workers, row in rows.items()} == pytest.approx(expected)
    assert all(row["fits"] and row["sharded_over"] == over(workers) for workers, row in rows.items())


def test_whole_weights_and_gradients_stay_between_micro_batches() -> None:
    facts: dict[str, Any] = {"sharded_over": TrainingOptions(shard="all").sharded_over, "weights_bytes": 4 * GIB}
    one = forecast(record(80, 4), state_bytes=12 * GIB, **facts)
    assert one.memory_of(2, 2) - one.memory_of(2, 1) == 8 * GIB
    assert one.memory_of(1, 4) == one.memory_of(1, 1)  # of a worker that has the whole, they do anyway
    several = forecast(record(80, 4, images=16_000), state_bytes=12 * GIB, **facts)
    assert several.memory_of(2, 4) == one.memory_of(2, 1)


def test_what_fits() -> None:
    facts: dict[str, Any] = {"sharded_over": TrainingOptions(shard="all").sharded_over, "weights_bytes": 0}
    run = forecast(record(80, 2), state_bytes=79 * GIB, **facts)
    assert run.memory_of(1, 1) == 73.5 * GIB and run.row(1, 100)["fits"]
    assert not forecast(record(80, 2), state_bytes=80 * GIB, **facts).row(1, 100)["fits"]  # with a margin of 8%
    full = {**MEMORY, "peak": 75 * GIB}  # 79 with others; what has run has fitted
    assert forecast(record(80, 2, memory=full), state_bytes=GIB, **facts).row(2, 200)["fits"]
    assert forecast(record(80, memory={"peak": GIB}, device="cpu")).row(1, 100)["fits"] is None


def test_what_was_not_measured_is_null() -> None:
    bare = {**record(80), "ceiling_images_per_second": None}
    row = forecast(bare, price=None, starting_joules=None).row(1, 100)
    assert (row["goodput"], row["cost_usd"], row["kwh"]) == (None, None, None)
    on_cpu = forecast(record(80, memory={"peak": GIB}, device="cpu"))
    assert on_cpu.measured.memory_bytes == GIB and on_cpu.measured.largest_batch_size is None
    assert on_cpu.row(1, 100)["gpus"] == 0 and not on_cpu.row(4, 400)["estimated"]


def test_the_largest_batch_leaves_a_margin() -> None:
    assert largest_batch(MEMORY, 100) == 264  # (80 * 0.92 - 4 - 6) GiB at 0.24 GiB a sample, in eights
    assert largest_batch({**MEMORY, "peak": 70 * GIB}, 4) == 3
    assert largest_batch({"peak": GIB}, 100) is None
    assert forecast(record(80)).measured.largest_batch_size == 264
