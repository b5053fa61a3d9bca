"""The clock of stages and live figures on a GPU: the device's time, measured without waiting for it."""

import time

import pytest
import torch

from raydali.measure.meter import EpochMeter, LiveMetrics, StageClock
from raydali.measure.records import Figures
from tests.support.clocks import least_cpu_seconds

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def never(*_: object) -> None:
    raise AssertionError("waited for the device")


@pytest.fixture(scope="module")
def cycles() -> int:
    """For torch.cuda._sleep: about 20 ms on the device."""
    torch.cuda._sleep(1_000_000)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(50_000_000)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return int(50_000_000 * 0.020 / min(times))


def test_stages_last_as_long_as_their_work_on_the_device(cycles: int) -> None:
    torch.cuda.synchronize()
    clock = StageClock(DEVICE)
    began = time.perf_counter()
    for stage, sleeps in (("step", 1), ("validation", 3), ("step", 2), ("step", 1)):
        clock.enter(stage)
        for _ in range(sleeps):
            torch.cuda._sleep(cycles)
    totals = clock.totals()
    wall = time.perf_counter() - began
    assert totals["step"] == pytest.approx(0.080, rel=0.1)
    assert totals["validation"] == pytest.approx(0.060, rel=0.1)
    assert sum(totals.values()) == pytest.approx(wall, rel=0.05)


def test_entering_a_stage_never_waits_for_the_device(cycles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StageClock(DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", never)
        patch.setattr(torch.cuda.Stream, "synchronize", never)
        patch.setattr(torch.cuda, "synchronize", never)
        clock.enter("step")
        for _ in range(10):
            torch.cuda._sleep(cycles)
        for number in range(100):
            clock.enter(("loader_wait", "step")[number % 2])
        assert not torch.cuda.current_stream().query(), "the device must still be busy"
    assert clock.totals()["step"] == pytest.approx(0.200, rel=0.1)


def test_marks_that_the_device_has_passed_are_not_kept() -> None:
    clock = StageClock(DEVICE)
    for _ in range(1000):
        clock.enter("step")
    torch.cuda.synchronize()
    clock.enter("step")
    assert len(clock._marks) <= 2


def test_a_host_wait_counts_only_while_the_device_is_idle(cycles: int) -> None:
    torch.cuda.synchronize()
    clock = StageClock(DEVICE)
    clock.enter("step")
    for _ in range(10):
        torch.cuda._sleep(cycles)
    clock.enter("loader_wait")  # the host has run ahead by 200 ms
    time.sleep(0.050)
    clock.enter("step")
    hidden = clock.totals()
    assert hidden["loader_wait"] < 0.005
    assert hidden["step"] == pytest.approx(0.200, rel=0.1)

    clock.reset()
    clock.enter("loader_wait")
    time.sleep(0.050)
    clock.enter("step")
    assert 0.050 <= clock.totals()["loader_wait"] < 0.070


def test_a_meter_waits_for_the_device_only_to_record() -> None:
    meter = EpochMeter(DEVICE, rank=0, world_size=1, node="here")
    losses = [torch.tensor(2.0, device=DEVICE), torch.tensor(4.0, device=DEVICE)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss, images in zip(losses, (10, 5), strict=True):
            meter.enter("loader_wait")
            meter.first_batch()
            meter.enter("step")
            meter.add(loss, images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record = meter.record()
    assert (record.images, record.loss_sum) == (15, 40.0)
    assert record.seconds == pytest.approx(record.loader_wait_seconds + record.step_seconds)


def test_a_pulse_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("PULSE_SECONDS", "SHORTEST_SECONDS"):
        monkeypatch.setattr(f"raydali.measure.meter.{limit}", 0.0)
    meter = EpochMeter(DEVICE, rank=0, world_size=1, node="here")
    published: list[Figures] = []
    pulse = LiveMetrics(meter, batch_size=8, micro_batches=1, publish=published.append)
    loss = torch.tensor(1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            meter.enter("loader_wait")
            meter.enter("step")
            torch.cuda._sleep(20_000_000)  # about 10 ms
            meter.add(loss, 8)
            meter.enter("loop")
            pulse.step()
        assert not torch.cuda.current_stream().query(), "the device must still be busy"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record = meter.record()
    pulse.end_epoch()
    assert sum(figures.images for figures in published) == 160
    assert published[-1].images_per_second is not None
    assert published[-1].images_per_second == pytest.approx(160 / record.seconds, rel=0.2)


def test_a_pulse_costs_next_to_nothing() -> None:
    meter = EpochMeter(DEVICE, rank=0, world_size=1, node="here")
    pulse = LiveMetrics(meter, batch_size=8, micro_batches=1, publish=lambda figures: None)
    assert least_cpu_seconds(pulse.step, 10_000) < 20 * least_cpu_seconds(time.monotonic, 10_000)
