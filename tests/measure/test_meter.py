"""The clock of a rank's stages on a CPU, its record of an epoch and its live figures; the GPU's is in tests/gpu."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydali.data.read.read_counts import COUNTS
from raydali.data.read.reading import PythonTime, WaitTimer
from raydali.measure.meter import PULSE_SECONDS, EpochMeter, LiveMetrics, StageClock
from raydali.measure.records import Figures
from tests.support.records import epoch_line

Clock = list[float]
UNTIMED: dict[str, Any] = {
    f"{name}_seconds": None for name in ("cpu", "cpu_queued", "helpers", "helpers_queued", "host_busy", "host_idle")
}
"""What the host says, which is of this very moment."""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time, in a list of one that the test may change."""
    clock = [1000.0]
    monkeypatch.setattr("raydali.measure.meter.time.perf_counter", lambda: clock[0])
    return clock


def cpu_clock() -> StageClock:
    return StageClock(torch.device("cpu"))


def test_each_stage_gets_the_time_until_the_next_one(now: Clock) -> None:
    clock = cpu_clock()
    clock.reset()
    now[0] += 50  # nothing runs before the first stage
    assert clock.totals() == {}
    for stage, seconds in [("wait", 1.0), ("step", 2.0), ("step", 1.0), ("wait", 0.25), ("step", 4.0)]:
        clock.enter(stage)
        now[0] += seconds
    clock.totals()["step"] = 100.0
    assert clock.totals() == clock.totals() == {"wait": 1.25, "step": 7.0}


def test_after_a_reset_the_running_stage_goes_on_from_now(now: Clock) -> None:
    clock = cpu_clock()
    for stage in ("wait", "step"):
        clock.enter(stage)
        now[0] += 1.0
    clock.reset()
    assert clock.so_far() == ({}, {}) and not clock.shortest
    now[0] += 4.0
    assert clock.totals() == {"step": 4.0}


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


def test_so_far_is_what_has_ended_and_the_shortest_run_is_known(now: Clock) -> None:
    clock = cpu_clock()
    for seconds in (2.0, 0.5, 3.0):
        clock.enter("step")
        now[0] += seconds
        clock.enter("wait")
        now[0] += 1.0
    assert clock.so_far() == ({"step": 5.5, "wait": 2.0}, {"step": 3, "wait": 2})
    assert clock.shortest == {"step": 0.5, "wait": 1.0} and clock.latest["step"] == 3.0


def make_loader() -> Any:
    return SimpleNamespace(waits=WaitTimer(), python=PythonTime(), prepared_batches=4)


def make_meter() -> EpochMeter:
    return EpochMeter(torch.device("cpu"), rank=1, world_size=3, node="here")


def run_stages(meter: EpochMeter, now: Clock, **seconds: float) -> None:
    for stage, length in seconds.items():
        meter.enter(stage)
        now[0] += length


def test_stages_become_seconds_and_validation_stands_apart(now: Clock) -> None:
    meter = make_meter()
    run_stages(meter, now, loader_wait=1.0, step=2.0, checkpoint=4.0, validation=8.0, loop=16.0)
    run_stages(meter, now, loader_wait=0.5)
    record = meter.record()
    assert (record.rank, record.world_size, record.node) == (1, 3, "here")
    assert (record.loader_wait_seconds, record.step_seconds, record.checkpoint_seconds) == (1.5, 2.0, 4.0)
    assert record.seconds == 1.5 + 2.0 + 4.0 + 16.0


def test_all_reduce_waits_are_part_of_steps_until_the_loss(now: Clock) -> None:
    meter = make_meter()
    for late in (2.0, 0.5):
        run_stages(meter, now, loader_wait=1.0, step=4.0)
        meter.exchange()
        now[0] += late
        meter.add(torch.tensor(1.0), 10)
        now[0] += 0.25
        meter.enter("loop")
        meter.end_step()
    record = meter.record()
    assert (record.step_seconds, record.exchange_seconds, record.shortest_exchange_seconds) == (11.0, 2.5, 0.5)
    assert (record.loader_wait_seconds, record.steps) == (2.0, 2)


def test_first_step_is_timed_and_loader_waits_count_after_it(now: Clock) -> None:
    loader = make_loader()
    waits = loader.waits.seconds
    waits["storage"] = loader.python.seconds = 1.0
    meter = EpochMeter(torch.device("cpu"), rank=0, world_size=1, node="here", loader=loader)
    waits["storage"] = loader.python.seconds = 5.0
    meter.first_batch()
    run_stages(meter, now, step=2.0, loader_wait=8.0)
    run_stages(meter, now, step=0.75)
    meter.exchange()
    now[0] += 16.0
    meter.add(torch.tensor(1.0), 10)
    now[0] += 0.25
    meter.end_step()
    waits |= {"storage": 7.0, "python": 1.0}
    loader.python.seconds = 5.5
    now[0] += 3.0
    meter.end_step()
    record = meter.record()
    assert (record.first_step_seconds, record.loader_waits) == (3.0, {"storage": 2.0, "python": 1.0})
    assert record.python_seconds == 0.5
    meter.reset()
    record = meter.record()
    assert (record.first_step_seconds, record.loader_waits) == (None, {"storage": 0.0, "python": 0.0})
    assert record.python_seconds == 0


@pytest.mark.usefixtures("now")
def test_losses_are_weighted_by_images() -> None:
    meter = make_meter()
    meter.add(torch.tensor(2.0, requires_grad=True), 10)
    meter.add(torch.tensor(4.0, dtype=torch.bfloat16), 5)
    record = meter.record()
    assert (record.images, record.loss_sum) == (15, 40.0)


def test_each_read_of_a_bucket_counts_to_one_epoch_whatever_is_recorded_meanwhile() -> None:
    COUNTS.take_away(COUNTS.so_far())
    meter = make_meter()
    COUNTS.add(requests=2, bytes=20)
    meter.record()  # for a checkpoint within the epoch
    COUNTS.add(requests=1, hits=4)
    record = meter.record()
    COUNTS.add(peer_hits=8)
    meter.reset()
    assert [record.storage[name] for name in ("requests", "bytes", "hits", "peer_hits")] == [3, 20, 4, 0]
    assert {name: number for name, number in meter.record().storage.items() if number} == {"peer_hits": 8}


@pytest.mark.usefixtures("now")
def test_the_sum_of_losses_keeps_small_parts_beside_a_large_one() -> None:
    meter = make_meter()
    meter.add(torch.tensor(2.0**24), 1)
    for _ in range(100):
        meter.add(torch.tensor(1.0), 1)
    assert meter.record().loss_sum == 2**24 + 100


def test_sampled_exchanges_stand_for_those_of_all_steps(now: Clock) -> None:
    meter = make_meter()
    meter.sample_exchange(9.0)  # of a step that was never measured
    for step, exchange in ((2.0, 0.5), (2.0, None), (30.0, 28.5), (1.75, 0.25), (4.0, None)):
        run_stages(meter, now, loader_wait=1.0, step=step, loop=0.5)
        meter.end_step()
        if exchange is not None:
            meter.sample_exchange(exchange)
    record = meter.record()
    assert (record.step_seconds, record.shortest_exchange_seconds) == (39.75, 0.25)
    assert record.exchange_seconds == 39.75 - 5 * 1.5  # and none for what one sample, of a long wait, would make it
    meter.reset()
    assert meter.record().exchange_seconds is None


def test_the_first_batch_is_noted_once_in_a_worker_s_life(now: Clock) -> None:
    meter = make_meter()
    assert meter.record().first_batch_seconds is None
    now[0] += 3.0
    meter.first_batch()
    now[0] += 3.0
    meter.first_batch()
    assert meter.record().first_batch_seconds == 3.0
    meter.reset()
    meter.first_batch()
    assert meter.record().first_batch_seconds is None


def test_the_first_batch_is_part_of_the_loader_s_wait(now: Clock) -> None:
    """A worker that joins others at the end of an epoch validates and saves with them before its first batch."""
    meter = make_meter()
    run_stages(meter, now, loop=1.0, validation=2.0)
    meter.reset()
    run_stages(meter, now, checkpoint=4.0, loop=1.0, loader_wait=0.5)
    meter.first_batch()
    run_stages(meter, now, step=0.25)
    meter.add(torch.tensor(1.0), 10)
    meter.end_step()
    record = meter.record()
    assert record.first_batch_seconds == record.loader_wait_seconds == 0.5
    line = epoch_line([replace(record, world_size=1)], validation={"seconds": 2.0})
    assert line["verdict"].startswith("short epochs: ") and line["verdict"].endswith(f" {6.5 / 7.75:.0%} of it")


def test_recording_ends_nothing_and_a_reset_begins_a_new_epoch(now: Clock) -> None:
    meter = make_meter()
    run_stages(meter, now, loader_wait=1.0, step=2.0)
    meter.add(torch.tensor(2.0), 10)
    first, second = (replace(meter.record(), **UNTIMED) for _ in range(2))
    assert first == second
    meter.reset()
    now[0] += 4.0
    meter.add(torch.tensor(3.0), 1)
    record = meter.record()
    assert (record.images, record.loss_sum, record.seconds) == (1, 3.0, 4.0)
    assert (record.loader_wait_seconds, record.step_seconds) == (0.0, 4.0)


# Live figures


class Rank:
    """Trains on micro-batches of 10 images, two a step, on a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ceiling: float | None = 40.0) -> None:
        self.now = 100.0
        monkeypatch.setattr("raydali.measure.meter.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("raydali.measure.meter.time.monotonic", lambda: self.now)
        self.loader: Any = make_loader()
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
