"""Figures while a GPU trains: never waiting for it, and of the steps that it is through with."""

import time

import pytest
import torch

from raydali.measure.live_metrics import LiveMetrics
from raydali.measure.meter import EpochMeter
from raydali.measure.records import Figures
from tests.support.clocks import least_cpu_seconds

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
CYCLES = 20_000_000
"""About 10 ms."""


def test_a_pulse_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("PULSE_SECONDS", "SHORTEST_SECONDS"):
        monkeypatch.setattr(f"raydali.measure.live_metrics.{limit}", 0.0)
    meter = EpochMeter(DEVICE, rank=0, world_size=1, node="here")
    published: list[Figures] = []
    pulse = LiveMetrics(
        meter,
        batch_size=8,
        micro_batches=1,
        ceiling_images_per_second=None,
        prepared=lambda: None,
        publish=published.append,
    )
    loss = torch.tensor(1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            meter.enter("loader_wait")
            meter.enter("step")
            torch.cuda._sleep(CYCLES)
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
    pulse = LiveMetrics(
        meter,
        batch_size=8,
        micro_batches=1,
        ceiling_images_per_second=None,
        prepared=lambda: None,
        publish=lambda figures: None,
    )
    assert least_cpu_seconds(pulse.step, 10_000) < 20 * least_cpu_seconds(time.monotonic, 10_000)
