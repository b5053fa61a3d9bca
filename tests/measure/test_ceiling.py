"""The ceiling of steps whose duration is known."""

import time

import pytest
import torch

from raydali.measure.ceiling import FEWEST_STEPS, MOST_STEPS, ceiling_images_per_second

CPU = torch.device("cpu")


def measured(step_seconds: float, ranks: int = 1, seconds: float = 0.2) -> tuple[float, int]:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        time.sleep(step_seconds)

    rate = ceiling_images_per_second(step, 10, CPU, lambda tensor: tensor * ranks, seconds=seconds)
    return rate, steps - 2


def test_is_images_over_the_time_of_a_step_summed_over_ranks() -> None:
    rate, steps = measured(0.02, ranks=3)
    assert 0.5 * 1500 < rate <= 1500  # a sleep is never too short
    assert 5 <= steps <= 10


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.0, MOST_STEPS), (0.15, FEWEST_STEPS)])
def test_steps_are_neither_too_many_nor_too_few(step_seconds: float, steps: int) -> None:
    assert measured(step_seconds)[1] == steps
