"""Who kept a loader waiting: seconds by cause, on clocks and on loaders that really wait."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn

from raydali.data.loading.make import make_loader
from raydali.data.sources.reading import PythonCpuTime, WaitTimer, reading, reading_seconds
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import ValidationImages
from raydali.data.tasks.pipeline import Inputs
from tests.support.pictures import encoded, files, one_batch, photograph


def test_time_inside_another_cause_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("raydali.data.sources.reading.time.perf_counter", lambda: now[0])
    waits = WaitTimer()
    with waits.by(lambda seconds: {"cpu decode": seconds / 4, "python": seconds * 3 / 4}):
        now[0] += 1.0
        with waits.on("storage"):
            now[0] += 2.0
            with waits.on("python"):
                now[0] += 4.0
        now[0] += 3.0
    assert waits.seconds == {"python": 4.0 + 3.0, "storage": 2.0, "cpu decode": 1.0}


def test_an_end_of_data_passes_through() -> None:
    waits = WaitTimer()
    with pytest.raises(StopIteration), waits.on("storage"):
        raise StopIteration
    assert waits.seconds["storage"] >= 0


def test_reading_adds_up() -> None:
    before, began = reading_seconds(), time.perf_counter()
    for _ in range(2):
        with reading():
            time.sleep(0.02)
    whole = time.perf_counter() - began
    assert 0.04 <= reading_seconds() - before <= whole


def test_python_time_counts_computation_and_not_waits() -> None:
    python, began = PythonCpuTime(), time.thread_time()
    with python.running():
        time.sleep(0.1)
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
    assert 0.1 <= python.seconds <= time.thread_time() - began


class SlowInputs(ValidationImages):
    def inputs(self, *args: Any) -> Inputs:
        for _ in range(10):
            late(None)
        return super().inputs(*args)


class SlowGraph(ValidationImages):
    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        return fn.python_function(images, function=late, output_layouts="HWC"), labels


def late(image: Any) -> Any:
    time.sleep(0.02)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    return image


class Inverted(ValidationImages):
    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        table = np.arange(255, -1, -1, dtype=np.uint8)
        return fn.python_function(images, function=table.take, output_layouts="HWC"), labels


def test_a_function_may_be_of_no_module(tmp_path: Path) -> None:
    source = files(tmp_path, one=encoded(photograph(size=(64, 64))))
    images, inverted = (
        one_batch(kind(image_size=32, resize_size=32), source)[0] for kind in (ValidationImages, Inverted)
    )
    assert inverted.equal(255 - images)


@pytest.mark.parametrize(("kind", "calls"), [(SlowInputs, 3 * 4 * 10), (SlowGraph, 3 * 16)])
def test_slow_python_is_distinguished_from_decoding_and_reading(
    tmp_path: Path, kind: type[ValidationImages], calls: int
) -> None:
    source = files(tmp_path, **{f"image{i}": encoded(photograph(size=(64, 64))) for i in range(16)})
    order = OrderedPass(samples=16, batch_size=4)
    with make_loader("dali", source, kind(image_size=32, resize_size=32), order, threads=1) as loader:
        began = time.perf_counter()
        for _ in range(3):
            for _ in loader:
                pass
        waits, whole = loader.waits.seconds, time.perf_counter() - began
        computed = loader.python.seconds
    assert sum(waits.values()) == pytest.approx(whole, rel=0.5)
    assert waits["python"] > 0.5 * sum(waits.values())
    assert computed == pytest.approx(calls * 0.01, rel=0.5)
