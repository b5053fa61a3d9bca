"""The ceiling of steps whose duration is known."""

import pytest
import torch

from raydali.measure.ceiling import FEWEST_STEPS, MOST_STEPS, ceiling_images_per_second

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

    rate = ceiling_images_per_second(step, 10, CPU, lambda tensor: tensor * ranks, seconds=seconds)
    return rate, steps - 2


def test_is_images_over_the_time_of_a_step_summed_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, steps = measured(monkeypatch, 0.02, ranks=3)
    assert rate == pytest.approx(1500) and steps == 10


@pytest.mark.parametrize(("step_seconds", "steps"), [(1e-6, MOST_STEPS), (0.15, FEWEST_STEPS)])
def test_steps_are_neither_too_many_nor_too_few(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, steps: int
) -> None:
    assert measured(monkeypatch, step_seconds)[1] == steps
