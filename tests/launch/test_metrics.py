"""What Prometheus gets to see, on doubles of Ray's counters and gauges; tests/cluster/ scrapes real ones."""

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import torch
from ray.util.metrics import Gauge

from raydali.launch.driver.recorder import HELD, LEDGER_GAUGES, QUARANTINED, RESTARTS, RunMetrics
from raydali.launch.worker import run_meter
from raydali.launch.worker.run_meter import GAUGES, IMAGES, RankMetrics
from raydali.measure.records import Figures
from raydali.run.events import Quarantined, Started
from tests.support.clocks import least_cpu_seconds

STARTED = Started(step=0, steps=400, world_size=2, device="cpu")
FIGURES = Figures(
    images=64,
    images_per_second=100.0,
    of_ceiling=0.9,
    loader_wait_fraction=0.05,
    step_seconds=0.3,
    own_step_seconds=0.2,
    loss=1.5,
    prepared_batches=4,
)


class Double:
    """Of Ray's Counter and Gauge: keeps what it is told, and refuses what they refuse."""

    made: dict[str, "Double"]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.description, self.tag_keys, self.values = description, tag_keys, list[float]()
        self.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> Self:
        assert tuple(tags) == self.tag_keys and all(isinstance(value, str) for value in tags.values())
        self.tags = tags
        return self

    def inc(self, value: float = 1.0) -> None:
        assert value > 0
        self._record(value)

    def set(self, value: float | None) -> None:
        if value is not None:
            self._record(value)

    def _record(self, value: float) -> None:
        self.values.append(value)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Double]:
    """All that were made, by their names."""
    monkeypatch.setattr(Double, "made", {}, raising=False)
    for module in ("ray.util.metrics", run_meter.__name__):
        monkeypatch.setattr(f"{module}.Counter", Double)
    monkeypatch.setattr(run_meter, "Gauge", Double)
    return Double.made


def on_cpu() -> RankMetrics:
    return RankMetrics("pets", 3, torch.device("cpu"))


def test_a_rank_sets_what_was_measured(made: dict[str, Double]) -> None:
    on_cpu().publish(FIGURES)
    assert made.keys() == {IMAGES, *GAUGES}
    assert {name: double.values for name, double in made.items() if name != "raydali_host_memory_bytes"} == {
        "raydali_images": [0.0, 64],
        "raydali_images_per_second": [100.0],
        "raydali_of_ceiling_ratio": [0.9],
        "raydali_loader_wait_ratio": [0.05],
        "raydali_step_seconds": [0.3],
        "raydali_own_step_seconds": [0.2],
        "raydali_loss": [1.5],
        "raydali_loader_prepared_batches": [4],
        "raydali_gpu_memory_bytes": [],
    }
    assert all(double.tags == {"run": "pets", "rank": "3"} for double in made.values())
    assert made["raydali_host_memory_bytes"].values[0] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_what_was_not_measured_is_not_set(made: dict[str, Double]) -> None:
    rank = on_cpu()
    rank.publish(Figures(images=0))
    assert made[IMAGES].values == [0.0]
    assert [name for name in GAUGES if made[name].values] == ["raydali_host_memory_bytes"]


def test_the_memory_of_a_gpu_is_what_pytorch_holds(made: dict[str, Double], monkeypatch: pytest.MonkeyPatch) -> None:
    held = {torch.device("cuda:1"): 1 << 30}
    monkeypatch.setattr(torch.cuda, "memory_reserved", held.__getitem__)
    RankMetrics("pets", 1, torch.device("cuda:1")).publish(FIGURES)
    assert made["raydali_gpu_memory_bytes"].values == [1 << 30]


def test_restarts_are_starts_but_the_first(made: dict[str, Double]) -> None:
    run = RunMetrics("pets")
    assert made[RESTARTS].values == [0.0] and made[RESTARTS].tags == {"run": "pets"}
    run.count(STARTED)
    assert made[RESTARTS].values == [0.0]
    run.count(STARTED)
    run.count(STARTED)
    assert made[RESTARTS].values == [0.0, 1.0, 1.0]


def test_broken_samples_are_counted(made: dict[str, Double]) -> None:
    run = RunMetrics("pets")
    run.count(Quarantined(of="training", id=3, path="3.jpg", reason="cut short", replaced_by=4))
    assert made[QUARANTINED].values == [0.0, 1.0] and made[QUARANTINED].tags == {"run": "pets"}


def test_all_figures_are_exported(made: dict[str, Double]) -> None:
    for field in fields(Figures):
        made.clear()
        value: Any = 7
        on_cpu().publish(Figures(**({"images": 0} | {field.name: value})))
        assert [name for name in made if 7 in made[name].values], field.name


def test_names_are_as_prometheus_wants_them(made: dict[str, Double]) -> None:
    on_cpu()
    RunMetrics("pets")
    for name, double in made.items():
        assert re.fullmatch(r"raydali_[a-z_]+", name) and not name.endswith("_total"), "Ray puts it to counters"
        assert double.description.endswith(".") and '"' not in double.description
    counters = {IMAGES, QUARANTINED, RESTARTS}
    lines = []
    for name, double in made.items():
        shown = f"ray_{name}_total" if name in counters else f"ray_{name}"
        kind = "counter" if name in counters else "gauge"
        lines += [f"# HELP {shown} {double.description}", f"# TYPE {shown} {kind}", f'{shown}{{run="pets"}} 0']
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs the program promtool: apt-get install prometheus")
    text = "\n".join([*lines, ""])
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_documentation_names_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
    counters = {f"ray_{name}_total" for name in (IMAGES, QUARANTINED, RESTARTS)}
    of_ledger = [HELD, *(name for name, _ in LEDGER_GAUGES.values())]
    shown = counters | {f"ray_{name}" for name in [*GAUGES, *of_ledger]}
    assert set(re.findall(r"^\| `(ray_\w+)` \|", text, re.MULTILINE)) == shown


def test_publishing_takes_no_time_to_speak_of() -> None:
    """With Ray's own counters and gauges, which need no running Ray."""
    rank, gauge = on_cpu(), Gauge("one", "of them", ("run",)).set_default_tags({"run": "a"})
    one = least_cpu_seconds(lambda: gauge.set(1.0), 1000)
    assert least_cpu_seconds(lambda: rank.publish(FIGURES), 1000) < 10 * len(GAUGES) * one
