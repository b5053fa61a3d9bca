"""Learning rates of warm-ups and decays, against the schedulers of torch and the formulas of other code bases."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydali.errors import UsageError
from raydali.training.learning_rates import learning_rate, parse_schedule
from tests.support.messages import mentioning

SCHEDULES = ["cosine", "poly:1", "poly:2", "step:2,0.5", "wsd", "wsd:1"]


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.floats(0, 0.9),
    warmup_start=st.floats(0, 1),
    minimum=st.floats(0, 0.4),
)
def test_rates_rise_to_the_peak_and_fall_to_the_minimum(
    schedule: str, warmup: float, warmup_start: float, minimum: float
) -> None:
    def rate(progress: float) -> float:
        return learning_rate(
            progress,
            peak=0.4,
            warmup=warmup,
            warmup_start=warmup_start,
            minimum=minimum,
            schedule=schedule,
            epochs=1,  # a step of 2 epochs never comes
        )

    shares = np.linspace(0, 1, 50)
    assert all(rate(a) <= rate(b) + 1e-12 for a, b in pairwise(shares[shares < warmup]))
    assert all(rate(a) >= rate(b) - 1e-12 for a, b in pairwise(shares[shares >= warmup]))
    assert rate(warmup) == pytest.approx(0.4)
    if warmup:
        assert rate(0) == pytest.approx(0.4 * warmup_start)
    if not schedule.startswith("step"):
        assert rate(1) == pytest.approx(minimum)


def test_epochs_have_the_rates_of_torchvisions_reference() -> None:
    """references/classification/train.py with --lr-warmup-epochs 5 --lr-warmup-decay 0.01 --lr-min 1e-3."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15, eta_min=1e-3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[5])
    for epoch in range(20):
        ours = learning_rate(epoch / 20, peak=0.5, warmup=5 / 20, warmup_start=0.01, minimum=1e-3)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_steps_come_after_epochs_of_the_run() -> None:
    rates = [
        learning_rate((epoch + 0.5) / 90, peak=0.1, warmup=5 / 90, minimum=5e-4, schedule="step:30,0.1", epochs=90)
        for epoch in range(90)
    ]
    assert rates[:5] == pytest.approx([0.01, 0.03, 0.05, 0.07, 0.09])
    assert rates[5:] == pytest.approx([0.1] * 25 + [0.01] * 30 + [1e-3] * 30)
    last = learning_rate(1.0, peak=0.1, warmup=0, minimum=5e-4, schedule="step:30,0.1", epochs=90)
    assert last == 5e-4


def test_a_polynomial_of_power_1_is_ffcvs_ramp() -> None:
    """ffcv-imagenet's get_lr interpolates (0, 2, 16 epochs) -> (1e-4, 1, 0) times the peak."""
    for epoch in np.linspace(0, 16, 33):
        ramp = np.interp(epoch, [0, 2, 16], [1e-4 * 1.7, 1.7, 0])
        ours = learning_rate(epoch / 16, peak=1.7, warmup=2 / 16, warmup_start=1e-4, schedule="poly:1")
        assert ours == pytest.approx(ramp, abs=1e-12)


@pytest.mark.parametrize(("schedule", "begin"), [("wsd", 0.8), ("wsd:0.5", 0.5), ("wsd:1", 0.1)])
def test_a_stable_rate_falls_linearly_in_the_last_share_but_not_before_the_warm_up_ends(
    schedule: str, begin: float
) -> None:
    """PyTorch's LinearLR goes from the peak to zero in so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    steps = round(100 * (1 - begin))
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=steps)
    for step in range(10, 101):
        if step > 100 - steps:
            optimizer.step()
            decay.step()
        ours = learning_rate(step / 100, peak=0.3, warmup=0.1, schedule=schedule)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("cosin", "cosine"),
        ("cosine:1", "cosine"),
        ("steps:30,0.1", "step:30,0.1"),
        ("step:30", "step:30,0.1"),
        ("step:30,1", "step:30,0.1"),
        ("step:0,0.1", "step:30,0.1"),
        ("poly:x", "poly:1"),
        ("poly:", "poly:1"),
        ("poly:nan", "poly:1"),
        ("linear", "poly:POWER"),
        ("wsd:0", "wsd:0.2"),
        ("wsd:1.5", "wsd:0.2"),
        ("wsd:", "wsd:0.2"),
    ],
)
def test_unknown_schedules_are_refused_with_what_is_near(text: str, near: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--schedule {text} {near}")):
        parse_schedule(text)
