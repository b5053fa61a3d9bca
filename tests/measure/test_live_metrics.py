"""Figures of the last seconds: from a meter whose clock the test turns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydali.data.sources.reading import PythonCpuTime, WaitTimer
from raydali.measure.meter import PULSE_SECONDS, EpochMeter, LiveMetrics
from raydali.measure.records import Figures


def loader() -> Any:
    return SimpleNamespace(waits=WaitTimer(), python=PythonCpuTime(), prepared_batches=4)


class Rank:
    """Trains on micro-batches of 10 images, two a step, on a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ceiling: float | None = 40.0) -> None:
        self.now = 100.0
        monkeypatch.setattr("raydali.measure.meter.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("raydali.measure.meter.time.monotonic", lambda: self.now)
        self.loader = loader()
        self.meter = EpochMeter(torch.device("cpu"), rank=0, world_size=1, node="here", loader=self.loader)
        self.published: list[Figures] = []
        self.pulse = LiveMetrics(self.meter, batch_size=10, micro_batches=2, publish=self.published.append)
        self.pulse.ceiling_images_per_second = ceiling
        self.meter.enter("loop")

    def spend(self, stage: str, seconds: float) -> None:
        self.meter.enter(stage)
        self.now += seconds

    def step(self, wait: float, work: float) -> None:
        for _ in range(2):
            self.spend("loader_wait", wait / 2)
            self.spend("step", work / 2)
            self.meter.add(torch.tensor(1.0), 10)
        self.meter.enter("loop")
        self.pulse.step()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_figures_are_of_the_time_since_the_pulse_before(rank: Rank) -> None:
    for _ in range(4):
        rank.step(wait=0.25, work=0.75)
    assert not rank.published
    rank.step(wait=0.25, work=0.75)
    for _ in range(3):
        rank.step(wait=1.0, work=1.0)
    first, second = rank.published
    assert first == Figures(
        images=100,
        images_per_second=20.0,
        of_ceiling=0.5,
        loader_wait_fraction=0.25,
        step_seconds=0.75,
        loss=1.0,
        prepared_batches=4,
    )
    assert second.images == 60
    assert (second.images_per_second, second.loader_wait_fraction, second.step_seconds) == (10.0, 0.5, 1.0)


def test_no_image_is_left_out_or_counted_twice(rank: Rank) -> None:
    for epoch in range(3):
        for _ in range(epoch * 7 + 1):
            rank.step(wait=0.1, work=0.6)
        rank.pulse.end_epoch()
        rank.meter.reset()
    assert sum(figures.images for figures in rank.published) == 20 * (1 + 8 + 15)


def test_validation_stands_apart_and_checkpoints_do_not(rank: Rank) -> None:
    rank.step(wait=0.5, work=1.5)
    rank.spend("checkpoint", 2.0)
    rank.spend("validation", 100.0)
    rank.meter.enter("loop")
    rank.pulse.end_epoch()
    (figures,) = rank.published
    assert (figures.images_per_second, figures.loader_wait_fraction) == (5.0, 0.125)


def test_a_short_epoch_has_figures_and_a_short_remainder_none(rank: Rank) -> None:
    rank.step(wait=0.0, work=0.5)
    rank.pulse.end_epoch()
    assert rank.published[-1].images_per_second == 40.0
    rank.meter.reset()
    for _ in range(int(PULSE_SECONDS)):
        rank.step(wait=0.0, work=1.0)
    rank.step(wait=0.0, work=0.5)
    rank.pulse.end_epoch()
    assert rank.published[-1] == Figures(images=20, prepared_batches=4)


def test_what_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, ceiling=None)
    rank.loader.prepared_batches = None
    rank.pulse.end_epoch()
    rank.step(wait=0.0, work=1.0)
    rank.pulse.end_epoch()
    nothing, something = rank.published
    assert nothing == Figures(images=0)
    assert something.images_per_second == 20.0 and something.of_ceiling is None


def test_an_exchange_is_a_part_of_its_step(rank: Rank) -> None:
    for _ in range(2):
        rank.spend("loader_wait", 0.5)
        rank.spend("step", 1.0)
        rank.meter.exchange()
        rank.now += 0.25
        rank.meter.add(torch.tensor(1.0), 10)
        rank.now += 0.25
    rank.meter.enter("loop")
    rank.pulse.end_epoch()
    (figures,) = rank.published
    assert (figures.images_per_second, figures.step_seconds, figures.loader_wait_fraction) == (5.0, 3.0, 0.25)
    assert figures.own_step_seconds == 2.5


def test_the_loss_is_the_mean_over_images_since_the_last_pulse(rank: Rank) -> None:
    for epoch in (0.0, 10.0):
        for loss in (1.0, 3.0):
            rank.meter.add(torch.tensor(epoch + loss), 10)
            rank.meter.add(torch.tensor(epoch + loss + 1), 30)
            rank.spend("step", 5.0)
            rank.meter.enter("loop")
            rank.pulse.step()
        rank.pulse.end_epoch()
        rank.meter.reset()
    assert [figures.loss for figures in rank.published if figures.loss is not None] == [1.75, 3.75, 11.75, 13.75]
