"""The ledger: its parts add up to the time for which workers were held, whatever ended their groups."""

import random
from typing import Any

import pytest

from raydali.run.ledger import PARTS, Held, Ledger, describe, group_id, parts_of, segments
from tests.support.messages import mentions
from tests.support.rank_records import rank


def epoch(step: int, *ranks: dict[str, Any], ceiling: float | None = 140.0, validation: float = 1.0) -> dict[str, Any]:
    return {
        "epoch": step // 50,
        "step": step,
        "world_size": ranks[-1]["world_size"],
        "ranks": [*ranks],
        "ceiling_images_per_second": ceiling,
        "validation": {"seconds": validation},
        "flops_per_image": 1e9,
        "costs": {"storage": 2 / 11, "checkpoint": 0.25 / 11, "validation": 1 / 11},
    }


def both(group: str, **changed: Any) -> list[dict[str, Any]]:
    return [rank(group, rank=i, **changed) for i in range(2)]


def held(number: int = 1, placed: float = 100.0, **changed: Any) -> Held:
    return Held(group=group_id("0123456789", str(number)), workers=2, placed=placed, **changed)


def ledger_of(*groups: Held) -> Ledger:
    ledger = Ledger()
    ledger.groups += groups
    return ledger


def total(summary: dict[str, Any]) -> float:
    return sum(float(summary["worker_seconds"][part]) for part in PARTS)  # each is rounded to 0.001 s


def test_an_epoch_is_split_by_the_costs_of_its_verdict() -> None:
    (segment,) = segments(epoch(50, *both("g")))
    parts = segment.parts(None)
    assert parts["ceiling"] == pytest.approx(1000 / 140)
    assert parts["data"] == pytest.approx(2.0) and parts["checkpoints"] == pytest.approx(0.25)
    assert sum(parts.values()) == pytest.approx(11.0) and parts["validation"] == 1.0
    assert (segment.flops, segment.peak_flops) == (1e12, 1e12)


def test_estimates_beyond_the_epoch_are_scaled_down() -> None:
    (segment,) = segments(epoch(50, *both("g")) | {"costs": {"storage": 0.5, "checkpoint": 0.25}})
    parts = segment.parts(None)
    assert sum(parts.values()) == pytest.approx(11.0) and "rest" in parts
    assert parts["data"] == pytest.approx(2 * parts["checkpoints"])


def test_an_epoch_of_two_groups_and_one_of_an_earlier_version() -> None:
    record = epoch(50, *both("a", images=100, seconds=3.0), *(rank("b", rank=i, size=3) for i in range(3)))
    one, last = segments(record)
    assert (one.group, one.world_size, last.group, last.world_size) == ("a", 2, "b", 3)
    assert one.parts(100.0)["ceiling"] == pytest.approx(2.0) and one.validation == 0.0
    assert "unmeasured" in one.parts(None) and sum(one.parts(None).values()) == pytest.approx(3.0)
    assert sum(last.parts(None).values()) == pytest.approx(11.0)
    ranks = [{name: value for name, value in each.items() if name != "group"} for each in both("")]
    (old,) = segments({**epoch(50, *both("")), "ranks": ranks, "costs": None})
    assert sum(old.parts(None).values()) == pytest.approx(11.0)


def test_a_run_without_failures() -> None:
    group = held(waited=20.0)
    ledger = ledger_of(group)
    group.joules = 1.8e6
    group.start(131.0, {"imports": 8.0, "workers": 15.0, "worker start": 6.0, "model": 4.0, "first batch": 0.6})
    group.joules = 7.2e6
    ledger.add_epoch(epoch(50, *both(group.group)))
    ledger.add_epoch(epoch(100, *both(group.group)))
    found = ledger.summary(160.0, price=1.8)
    assert found["worker_seconds"]["open"] == pytest.approx(2 * (60 - 30.4 - 22)) and total(found) == pytest.approx(
        120, abs=0.02
    )
    group.released, group.saved = 153.0, True
    found = ledger.summary(1000.0, price=1.8)
    assert total(found) == pytest.approx(found["worker_seconds"]["held"], abs=0.02)
    assert found["worker_seconds"]["held"] == pytest.approx(106.0)
    assert found["worker_seconds"]["starting"] == pytest.approx(2 * 30.4)
    assert found["starting"]["worker start"] == 12.0 and found["starting"]["model"] == 8.0
    assert found["starting"]["workers"] == pytest.approx(2 * 20.4) and "imports" not in found["starting"]
    assert found["goodput"] == pytest.approx(2 * 2000 / 140 / 106, abs=1e-4)
    assert found["mfu"] == pytest.approx(2e12 / (106 * 1e12), abs=1e-4)
    assert found["groups"][0]["joules_begun"] == 1.8e6
    assert found["kwh"] == 2.0 and found["cost_usd"] == pytest.approx(106 / 3600 * 1.8)
    assert found["seconds"] == {"held": 53.0, "before_placement": 20.0, "without_driver": 0.0}
    assert sum(share for _, _, share in parts_of(found)) == pytest.approx(1.0)
    (shares, figures) = describe(found)
    assert "starting 57.4%" in shares and "$0.05 at $1.8 an hour" in figures and "2 kWh" in figures


def test_a_failure_a_resize_and_a_dead_driver() -> None:
    killed = held(1, 100.0, released=150.0, begun=110.0, waited=5.0)
    resized = held(2, 152.0, released=180.0, begun=160.0, waited=2.0, restarts=True, saved=True)
    dead = held(3, 181.0, released=190.0, waited=1.0, restarts=True)
    after = held(4, 250.0, released=270.0, begun=255.0, waited=10.0, saved=True)
    ledger = ledger_of(killed, resized, dead, after)
    ledger.add_epoch(epoch(50, *both(killed.group)))
    ledger.add_epoch(epoch(100, *both(killed.group)))
    ledger.take_back(70)  # the second epoch was not covered by a checkpoint
    ledger.add_epoch(epoch(100, *both(killed.group, seconds=4.0, images=200), *both(resized.group)))
    ledger.add_epoch(epoch(150, *both(after.group)))
    found = ledger.summary(900.0)
    of = found["worker_seconds"]
    assert total(found) == pytest.approx(of["held"], abs=0.02)
    assert of["held"] == pytest.approx(2 * (50 + 28 + 9 + 20))
    assert of["again"] == pytest.approx(2 * (40 - 11 - 4))
    assert of["restarting"] == pytest.approx(2 * (8 + 9)) and found["restarting"]["failed"] == 18.0
    assert of["starting"] == pytest.approx(2 * (10 + 5)) and of["open"] == 0.0
    assert found["seconds"]["without_driver"] == pytest.approx(250 - 10 - 190)
    assert found["cost_usd"] is None and found["kwh"] is None


def test_a_sharded_run_says_over_how_many_workers() -> None:
    assert "sharded" not in describe(ledger_of(held()).summary(200.0))[1]
    found = ledger_of(*(held(i, sharded_over=over) for i, over in enumerate((4, 1, 8, 4)))).summary(200.0)
    assert "sharded over 4 and 8 workers" in describe(found)[1]
    for group in found["groups"]:  # as earlier versions wrote it
        del group["sharded_over"]
    assert "sharded" not in describe(found)[1]


def test_a_start_that_a_dead_driver_did_not_write() -> None:
    group = held(released=150.0)
    ledger = ledger_of(group)
    ledger.add_epoch(epoch(50, *both(group.group)))
    found = ledger.summary(200.0)
    assert found["worker_seconds"]["held"] == 100.0 and total(found) == pytest.approx(100.0, abs=0.02)
    assert found["worker_seconds"]["starting"] == pytest.approx(2 * (50 - 11), abs=0.02)


def test_a_later_ceiling_holds_for_an_epoch_without_one() -> None:
    group = held(begun=100.0, released=123.0, saved=True)
    ledger = ledger_of(group)
    ledger.add_epoch(epoch(50, *both(group.group), ceiling=None))
    assert ledger.summary(200.0)["goodput"] is None
    ledger.add_epoch(epoch(100, *both(group.group)))
    assert ledger.summary(200.0)["goodput"] == pytest.approx(2000 / 140 / 23, abs=1e-4)


def test_goodput_is_null_without_a_ceiling_whatever_explains_the_time() -> None:
    group = held(begun=100.0, released=123.0, saved=True)
    ledger = ledger_of(group)
    assert ledger.summary(200.0)["goodput"] is None  # no epoch was completed
    record = epoch(50, *both(group.group), ceiling=None) | {"costs": {"storage": 0.7, "contention": 0.6}}
    ledger.add_epoch(record)
    found = ledger.summary(200.0)
    assert found["worker_seconds"]["unmeasured"] == 0.0 and found["goodput"] is None
    assert "0.0%" not in (figures := describe(found)[1]) and mentions(figures, "goodput kWh not measured")


def test_mfu_is_null_if_operations_of_an_epoch_were_not_counted() -> None:
    group = held(begun=100.0, released=123.0, saved=True)
    ledger = ledger_of(group)
    ledger.add_epoch(epoch(50, *both(group.group)))
    assert ledger.summary(200.0)["mfu"] is not None
    ledger.add_epoch(epoch(100, *both(group.group)) | {"flops_per_image": None})
    assert ledger.summary(200.0)["mfu"] is None


def test_energy_is_the_sum_of_what_was_measured() -> None:
    one, died = held(1, released=198.0, joules=7.2e6), held(2, 200.0, released=202.0)
    found = ledger_of(one, died).summary(900.0)
    assert (found["kwh"], found["kwh_share"]) == (2.0, 0.98)
    assert mentions(describe(found)[1], "2 kWh 98.0%")
    found = ledger_of(died).summary(900.0)
    assert (found["kwh"], found["kwh_share"]) == (None, None)
    found = ledger_of(one).summary(900.0)
    assert (found["kwh"], found["kwh_share"]) == (2.0, 1.0) and "100" not in describe(found)[1]
    del found["kwh_share"]  # as an earlier version has written it
    assert mentions(describe(found)[1], "2 kWh")


def test_parts_add_up_in_random_runs() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        ledger, now, step = Ledger(), 0.0, 0
        for number in range(draw.randint(1, 8)):
            now += draw.uniform(0, 9)
            group = held(number, now, restarts=draw.random() < 0.5, waited=0.0)
            ledger.groups.append(group)
            now += draw.uniform(0, 9)
            if draw.random() < 0.8:
                group.start(now, {"workers": 3.0, "model": draw.uniform(0, 4), "first batch": draw.uniform(0, 1)})
                for _ in range(draw.randint(0, 3)):
                    step += 50
                    ranks = both(group.group, loader_wait_seconds=draw.uniform(0, 9), seconds=draw.uniform(8, 12))
                    ledger.add_epoch(epoch(step, *ranks, ceiling=draw.choice([None, 140.0, 90.0])))
                    now += 14.0
                if draw.random() < 0.3:
                    step -= 50 * draw.randint(0, 2)
                    ledger.take_back(step)
            now += draw.uniform(0, 5)
            group.released, group.saved = now, draw.random() < 0.5
            found = ledger.summary(now)
            assert total(found) == pytest.approx(found["worker_seconds"]["held"], abs=0.02), seed


def test_unknown_fields_of_another_version_are_passed_over() -> None:
    summary = ledger_of(held(released=103.0)).summary(200.0)
    again = Ledger([{**each, "colour": "red"} for each in summary["groups"]])
    assert again.summary(200.0) == summary
