"""Who kept a loader waiting: seconds by cause, on clocks and on loaders that really wait."""

import time
from pathlib import Path
from typing import Any

import pytest
from nvidia.dali import fn

from raydali.data.classification import ValidationImages
from raydali.data.loader import make_loader
from raydali.data.pipeline import Inputs
from raydali.data.stream import OrderedPass
from raydali.data.timing import Waits, reading, reading_seconds
from tests.data.pictures import encoded, files, photograph


def test_time_inside_another_cause_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("raydali.data.timing.time.perf_counter", lambda: now[0])
    waits = Waits()
    with waits.by(lambda seconds: {"cpu decode": seconds / 4, "python": seconds * 3 / 4}):
        now[0] += 1.0
        with waits.on("storage"):
            now[0] += 2.0
            with waits.on("python"):
                now[0] += 4.0
        now[0] += 3.0
    assert waits.seconds == {"python": 4.0 + 3.0, "storage": 2.0, "cpu decode": 1.0}


def test_an_end_of_data_passes_through() -> None:
    waits = Waits()
    with pytest.raises(StopIteration), waits.on("storage"):
        raise StopIteration
    assert waits.seconds["storage"] >= 0


def test_reading_adds_up() -> None:
    before = reading_seconds()
    for _ in range(2):
        with reading():
            time.sleep(0.02)
    assert 0.04 <= reading_seconds() - before < 1


class SlowInputs(ValidationImages):
    def inputs(self, *args: Any) -> Inputs:
        time.sleep(0.3)
        return super().inputs(*args)


class SlowGraph(ValidationImages):
    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        images, labels = super().graph(source, *inputs, device=device)
        return fn.python_function(images, function=late, output_layouts="HWC"), labels


def late(image: Any) -> Any:
    time.sleep(0.03)
    return image


@pytest.mark.parametrize("kind", [SlowInputs, SlowGraph])
def test_python_that_holds_a_loader_up_is_told_from_decoding_and_reading(
    tmp_path: Path, kind: type[ValidationImages]
) -> None:
    source = files(tmp_path, **{f"image{i}": encoded(photograph(size=(64, 64))) for i in range(16)})
    order = OrderedPass(samples=16, batch_size=4)
    with make_loader("dali", source, kind(image_size=32, resize_size=32), order, threads=1) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        waits, whole = loader.waits.seconds, loader.wait_seconds
    assert sum(waits.values()) == pytest.approx(whole, rel=0.5)
    assert waits["python"] > 0.5 * sum(waits.values())
