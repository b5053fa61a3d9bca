"""The ceiling of steps whose duration is known."""

from typing import Any

import pytest
import torch

from raydali.measure.ceiling import (
    MAX_STEPS,
    MIN_STEPS,
    ceiling_images_per_second,
    disturbed,
    share_of_ceiling,
)
from tests.support.messages import mentions
from tests.support.warm_up_steps import take_all

CPU = torch.device("cpu")


def measured(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, ranks: int = 1, seconds: float = 0.2
) -> tuple[float, int]:
    now, steps = 0.0, 0
    monkeypatch.setattr("raydali.measure.ceiling.time.perf_counter", lambda: now)

    def step() -> None:
        nonlocal now, steps
        steps += 1
        now += step_seconds

    rate = take_all(ceiling_images_per_second(lambda: step, 10, CPU, lambda tensor: tensor * ranks, seconds=seconds))
    return rate, steps - 1


def test_is_images_over_the_time_of_a_step_summed_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, steps = measured(monkeypatch, 0.02, ranks=3)
    assert rate == pytest.approx(1500) and steps == 10


@pytest.mark.parametrize(("step_seconds", "steps"), [(1e-6, MAX_STEPS), (0.15, MIN_STEPS), (4.0, 2), (30.0, 1)])
def test_steps_are_neither_too_many_nor_too_few(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, steps: int
) -> None:
    assert measured(monkeypatch, step_seconds)[1] == steps


def test_no_share_is_above_what_a_ceiling_allows() -> None:
    assert share_of_ceiling(95.0, 100.0) == 0.95
    assert share_of_ceiling(105.0, 100.0) == 1.0
    assert [share_of_ceiling(*values) for values in ((1152.9, 100.0), (None, 100.0), (100.0, None))] == [None] * 3


def test_a_machine_is_busy_if_others_use_all_cores() -> None:
    def rank(own: float, busy: float, idle: float, node: str = "a") -> dict[str, Any]:
        return {"node": node, "cpu_seconds": own, "host_busy_seconds": busy, "host_idle_seconds": idle}

    assert mentions(disturbed([rank(0.8, 2.0, 0.0)]), "60%")
    assert disturbed([rank(0.8, 2.0, 0.0), rank(0.6, 2.0, 0.0)]) == ""
    assert disturbed([rank(0.8, 2.0, 2.0)]) == ""
    assert "node b" in disturbed([rank(2.0, 2.0, 0.0), rank(0.5, 2.0, 0.0, "b")])
    assert disturbed([dict.fromkeys(("cpu_seconds", "host_busy_seconds", "host_idle_seconds")) | {"node": "a"}]) == ""
