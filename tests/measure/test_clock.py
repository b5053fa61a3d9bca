"""The clock of stages on a CPU; the GPU's is in tests/gpu."""

import time

import pytest
import torch

from raydali.measure.clock import StageClock


class Time:
    """A clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("raydali.measure.clock.time.perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def cpu_clock() -> StageClock:
    return StageClock(torch.device("cpu"))


def test_each_stage_gets_the_time_until_the_next_one(passing: Time) -> None:
    clock = cpu_clock()
    passing.passes(50)  # nothing runs before the first stage
    for stage, seconds in [("wait", 1.0), ("step", 2.0), ("wait", 0.25), ("step", 4.0), ("checkpoint", 8.0)]:
        clock.enter(stage)
        passing.passes(seconds)
    assert clock.totals() == {"wait": 1.25, "step": 6.0, "checkpoint": 8.0}


def test_entering_the_running_stage_again_goes_on_with_it(passing: Time) -> None:
    clock = cpu_clock()
    for _ in range(3):
        clock.enter("step")
        passing.passes(2.0)
    assert clock.totals() == {"step": 6.0}


def test_looking_changes_nothing(passing: Time) -> None:
    clock = cpu_clock()
    clock.enter("step")
    for seen in (1.0, 2.0, 3.0):
        passing.passes(1.0)
        assert clock.totals() == clock.totals() == {"step": seen}
    clock.totals()["step"] = 100.0
    assert clock.totals() == {"step": 3.0}


def test_after_a_reset_the_running_stage_goes_on_from_now(passing: Time) -> None:
    clock = cpu_clock()
    clock.enter("wait")
    passing.passes(1.0)
    clock.enter("step")
    passing.passes(2.0)
    clock.reset()
    passing.passes(4.0)
    assert clock.totals() == {"step": 4.0}


def test_nothing_entered_is_nothing_measured(passing: Time) -> None:
    clock = cpu_clock()
    clock.reset()
    passing.passes(1.0)
    assert clock.totals() == {}


def test_stages_add_up_to_the_wall_time() -> None:
    before = time.perf_counter()
    clock = cpu_clock()
    clock.enter("wait")
    began = time.perf_counter()
    for stage in ("step", "wait", "step", "checkpoint", "loop"):
        time.sleep(0.002)
        clock.enter(stage)
    time.sleep(0.002)
    ended = time.perf_counter()
    total = sum(clock.totals().values())
    assert ended - began <= total <= time.perf_counter() - before


def test_so_far_is_what_has_ended(passing: Time) -> None:
    clock = cpu_clock()
    assert clock.so_far() == ({}, {})
    for stage in ("wait", "step", "wait", "step"):
        clock.enter(stage)
        passing.passes(1.0)
    assert clock.so_far() == ({"wait": 2.0, "step": 1.0}, {"wait": 2, "step": 1})
    clock.reset()
    assert clock.so_far() == ({}, {})


def test_the_shortest_time_of_a_stage_is_known_until_a_reset(passing: Time) -> None:
    clock = cpu_clock()
    assert clock.shortest("step") is None
    for seconds in (2.0, 0.5, 3.0):
        clock.enter("step")
        passing.passes(seconds)
        clock.enter("wait")
    clock.totals()
    assert clock.shortest("step") == 0.5
    clock.reset()
    assert clock.shortest("step") is None
