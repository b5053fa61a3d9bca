"""The forecast of a run from the records of a short one, on numbers that are easy to check."""

from dataclasses import replace
from typing import Any

import pytest

from raydali.measure.forecast import Forecast
from raydali.measure.memory import largest_batch
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
        "ceiling_images_per_second": 1100.0 * workers,
        "validation": {"seconds": 3.0, "samples": 500, "all_samples": 2500, "sample_seconds": 0.004},
        "ranks": [rank("g", rank=i, size=workers, **of_ranks) for i in range(workers)],
    }


def first(workers: int = 1) -> dict[str, Any]:
    """With a first batch of 2 s, and no checkpoint before it."""
    changed = {"first_batch_seconds": 2.0, "loader_wait_seconds": 2.0, "seconds": 4.0, "checkpoint_seconds": 0.0}
    return record(20, workers, **changed)


def forecast(*records: dict[str, Any], workers: int = 1, **changed: Any) -> Forecast:
    facts: dict[str, Any] = {
        "samples": 10_000,
        "epochs": 10,
        "batch_size": 100,
        "global_batch_size": 100 * workers,
        "validations": 10,
        "checkpoint_every": 0,
        "before_placement": 5.0,
        "starting": 20.0,
        "ending": 2.0,
        "kilowatts": 0.36,
        "price": 3.6,
        "weights_bytes": 10**8,
    }
    return Forecast(workers=workers, records=records, **facts | changed)


def test_a_run_takes_what_its_parts_take() -> None:
    run = forecast(first(), record(80))
    assert run.steps == 1000 and run.measured_step == pytest.approx((0.1, 0.0))
    assert run.validation_seconds == pytest.approx(1.0 + 0.004 * 2500) and run.checkpoint_seconds == pytest.approx(0.5)
    assert run.epoch_seconds == pytest.approx(10 + 11 + 0.5)
    assert run.run_seconds == pytest.approx(5 + 20 + 2 + 10 * 21.5 + 2)
    row = run.row(there=1)
    assert row["goodput"] == pytest.approx(100_000 / 1100 / (run.run_seconds - 5), abs=1e-4)
    assert row["cost_usd"] == pytest.approx((run.run_seconds - 5) / 1000, abs=1e-4)
    assert row["kwh"] == pytest.approx((run.run_seconds - 5) / 10_000, abs=1e-4)
    assert (row["gpus"], row["estimated"], row["bandwidth"]) == (1, False, None)


def test_fewer_validations_and_more_checkpoints() -> None:
    run = forecast(first(), record(80, checkpoint_seconds=2.5, seconds=10.5), validations=3, checkpoint_every=20)
    assert run.checkpoint_seconds == pytest.approx(0.5)
    assert run.run_seconds == pytest.approx(5 + 20 + 2 + 100 + 3 * 11 + 60 * 0.5 + 2)


def test_a_single_record_has_the_costs_of_the_start() -> None:
    run = forecast(first())
    assert run.measured_step[0] == pytest.approx(0.1) and run.run_seconds == pytest.approx(5 + 20 + 2 + 100 + 110 + 2)
    never = {**first(), "validation": None}
    assert forecast(never, validations=0).run_seconds == pytest.approx(5 + 20 + 2 + 100 + 2)


def test_a_validation_of_one_batch_grows_with_its_samples() -> None:
    one = {"seconds": 3.0, "samples": 500, "all_samples": 2500, "sample_seconds": None}
    assert forecast({**record(80), "validation": one}).validation_seconds == pytest.approx(15.0)
    assert forecast({**record(80), "validation": {**one, "all_samples": 500}}).validation_seconds == pytest.approx(3.0)


def test_other_numbers_of_gpus() -> None:
    one = forecast(first(), record(80))
    four = one.on(4, None, grows=True)
    assert (four.steps, four.step_seconds, four.global_batch_size) == pytest.approx((250, 0.1, 400))
    assert four.validation_seconds == pytest.approx(1.0 + 0.004 * 2500 / 4)
    row = four.row(there=1)
    assert row["estimated"] and row["bandwidth"] is None and row["images_per_second"] == pytest.approx(4000)
    assert four.on(4, 1e9, grows=True).step_seconds == pytest.approx(0.1 + 2 * 3 / 4 * 0.1)
    assert four.on(4, 1e9, grows=True).row(there=1)["bandwidth"] == 1e9
    fixed = replace(one, global_batch_size=800).on(4, None, grows=False)
    assert (fixed.steps, fixed.step_seconds) == pytest.approx((125, 0.2))
    two = forecast(first(2), record(80, 2), workers=2)
    assert two.step_seconds == pytest.approx(0.1) and two.measured_step[1] == pytest.approx(0.02)
    assert two.on(1, None, grows=True).step_seconds == pytest.approx(0.08)
    assert two.on(4, None, grows=True).step_seconds == pytest.approx(0.08 + 0.02 * (3 / 4) / (1 / 2))


def test_what_was_not_measured_is_null() -> None:
    bare = {**record(80), "ceiling_images_per_second": None}
    row = forecast(bare, price=None, kilowatts=None).row(there=1)
    assert (row["goodput"], row["cost_usd"], row["kwh"]) == (None, None, None)
    on_cpu = record(80, memory={"peak": GIB}, device="cpu")
    assert forecast(on_cpu).memory() == {
        "memory_bytes": GIB,
        "memory_total_bytes": None,
        "largest_batch_size": None,
    }
    assert forecast(on_cpu).row(there=0)["gpus"] == 0


def test_the_largest_batch_leaves_a_margin() -> None:
    assert largest_batch(MEMORY, 100) == 264  # (80 * 0.92 - 4 - 6) GiB at 0.24 GiB a sample, in eights
    assert largest_batch({**MEMORY, "peak": 70 * GIB}, 4) == 3
    assert largest_batch({"peak": GIB}, 100) is None
    assert forecast(record(80)).memory()["largest_batch_size"] == 264
