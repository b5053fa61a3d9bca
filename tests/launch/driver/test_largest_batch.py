"""`--batch-size auto`: which sizes are tried, on a GPU whose memory a formula gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import JOB, Config
from raydali.errors import UsageError
from raydali.launch.driver import plan
from raydali.launch.driver.command import _without_auto
from raydali.measure.memory import OUT_OF_MEMORY
from raydali.run.folder import CONFIG, EPOCHS, FORM, RunFolder
from tests.support.rank_records import rank

GIB = 2**30


class Gpu:
    """A GPU of 80 GiB, on which `overhead` GiB and a quarter of a GiB for each sample are needed."""

    def __init__(self, overhead: float = 4.0, workers: int = 1, samples: int = 10**6) -> None:
        self.overhead, self.workers, self.samples, self.tried = overhead, workers, samples, list[int]()
        self.asked = list[tuple[str | None, int | None]]()

    def launch(self, _job: object, given: Config, *_: Any) -> None:
        self.tried.append(given.batch_size)
        self.asked.append((given.workers, given.global_batch_size))
        assert given.global_batch_size is None or given.global_batch_size % given.batch_size == 0
        if self.overhead + given.batch_size / 4 > 80:
            raise UsageError(f"--batch-size {given.batch_size} {OUT_OF_MEMORY}: about 1 would fit")
        memory = {"peak": int((2 + given.batch_size / 4) * GIB), "held": 2 * GIB, "others": 0, "total": 80 * GIB}
        ranks = [rank("g", rank=i, size=self.workers, memory=memory) for i in range(self.workers)]
        folder = RunFolder(given.storage, str(given.name))
        folder.create()
        folder.write_json(CONFIG, {"form": FORM, "samples": self.samples})
        row = {"ranks": ranks, "seconds": 10.0, "checkpoint_seconds": 0.1, "validation": None, "costs": {}}
        folder.append(EPOCHS, {**row, "ceiling_images_per_second": None, "world_size": self.workers})


def found(gpu: Gpu, path: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    monkeypatch.setattr(plan, "launch", gpu.launch)
    monkeypatch.setattr(plan, "gpu_names", lambda: ["H100"])
    size: int = plan.with_largest_batch(JOB, Config(storage=str(path), **given)).batch_size
    assert not [*path.glob("plan-*")]
    return size


def test_what_was_measured_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    assert found(gpu, tmp_path, monkeypatch) == 280  # (80 * 0.92 - 2) * 4, in eights
    assert gpu.tried == [256, 280]


def test_a_size_that_is_too_large_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(overhead=50.0)
    assert found(gpu, tmp_path, monkeypatch, batch_size=512) <= 120
    assert gpu.tried[:3] == [512, 256, 128] and gpu.tried[3] == 64


def test_a_size_that_was_estimated_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(overhead=15.0)
    assert found(gpu, tmp_path, monkeypatch, batch_size=64) == 245
    assert gpu.tried == [64, 280, 245]


def test_limits_of_the_data_and_of_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(Gpu(samples=300, workers=2), tmp_path, monkeypatch) == 150
    assert found(Gpu(workers=2), tmp_path, monkeypatch, global_batch_size=1024) == 256
    assert found(Gpu(workers=2), tmp_path, monkeypatch, global_batch_size=960) == 240


def test_the_largest_shards_are_those_of_the_fewest_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic: dict[str, Any] = {"workers": "2:8", "shard": "all"}
    gpu = Gpu(workers=2)
    assert found(gpu, tmp_path, monkeypatch, **elastic) == 280
    assert gpu.asked == [("2", 256 * 8), ("2", 280 * 8)]
    assert found(Gpu(workers=2, samples=1000), tmp_path, monkeypatch, **elastic) == 125  # for 8 workers
    gpu = Gpu(workers=2)
    assert found(gpu, tmp_path, monkeypatch, **elastic, global_batch_size=960) == 120
    assert {*gpu.asked} == {("2", 960)}
    for given in (elastic | {"shard": None}, elastic | {"workers": "8"}):
        gpu = Gpu(workers=8)
        assert found(gpu, tmp_path, monkeypatch, **given) == 280
        assert {*gpu.asked} == {(given["workers"], None)}


def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=OUT_OF_MEMORY):
        found(Gpu(overhead=81.0), tmp_path, monkeypatch)


def test_a_resume_keeps_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / CONFIG).write_text(json.dumps({"form": FORM, "batch_size": 72}))
    gpu = Gpu()
    assert found(gpu, tmp_path, monkeypatch, name="mine") == 72 and gpu.tried == []


def test_machines_without_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(plan, "gpu_names", list)
    with pytest.raises(UsageError, match="there are none: give a number"):
        plan.with_largest_batch(JOB, Config(storage=str(tmp_path)))


def test_the_word_auto_is_taken_out_of_the_command_line() -> None:
    assert _without_auto(["--batch-size", "auto", "--epochs", "2"]) == ["--epochs", "2"]
    assert _without_auto(["--epochs", "2", "--batch_size=auto"]) == ["--epochs", "2"]
    assert _without_auto(["--name", "auto", "--batch-size", "8"]) == ["--name", "auto", "--batch-size", "8"]
