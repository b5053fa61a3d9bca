"""`bench strategies` on the CPU: rows, files, refusals, and the arithmetic of its figures.

No test asserts how fast a strategy is.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydali.bench import strategies
from raydali.bench.processes import MeasurementError
from raydali.bench.strategies import METRICS, STRATEGIES, StrategiesBench, strategy_name, to_one
from raydali.bench.train_rank import TrainTask
from raydali.errors import CommandError, UsageError
from tests.support.messages import mentioning, mentions

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = StrategiesBench(
    make=32,
    gpus=0,
    model="digits",
    precisions="fp32",
    loaders="dali",
    batch_size=4,
    image_size=32,
    threads=1,
    workers=1,
    steps=2,
    repeats=2,
)


def measured(rate: float) -> dict[str, Any]:
    """What the processes of a row measured: two rounds."""
    figures = [{"images_per_second": rate, "loader_wait_fraction": 0.1}]
    figures.append({"images_per_second": 3 * rate, "loader_wait_fraction": 0.2})
    return {"ceiling_before": None, "rounds": [{"real": each} for each in figures], "captured": True}


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    for module in ("bench.strategies", "bench.common", "output"):
        monkeypatch.setattr(f"raydali.{module}.gpu_names", lambda: ["A"] * gpus)


# ---------------------------------------------------------------------------------------------------------------------
# Measured


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_measures_ddp_fed_by_dali(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files: dict[str, Any] = {"json": str(tmp_path / "s.json")}
    result = strategies.main(replace(OPTIONS, strategies="dp,ddp,sync-bn", **files))
    assert json.loads(Path(files["json"]).read_text()) == result
    assert result["command"] == "bench strategies"
    assert (result["settings"]["images"], result["settings"]["gpus"]) == (32, 0)
    (row,) = result["rows"]
    assert (row["strategy"], row["processes"], row["gpus"], row["error"]) == ("ddp", 2, 0, None)
    assert set(METRICS) < set(row)
    assert len(row["repeats"]) == 2 and all(0 < rate < math.inf for rate in row["repeats"])
    assert 0 < row["loader_wait_fraction"] < 1
    assert row["to_one"] is None and row["captured"] is False
    heard = capfd.readouterr()
    assert mentions(heard.err, "DataParallel DDP SyncBatchNorm 2 GPUs")
    assert mentions(heard.out, "DDP 2 fp32 dali")


def test_measures_one_process_in_mixed_precision_fed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def here(function: Any, task: TrainTask, *_: Any, **__: Any) -> Any:
        return [function(task, 0, 0)]

    monkeypatch.setattr("raydali.bench.processes.run_ranks", here)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # so that it is so again afterwards
    options = replace(OPTIONS, strategies="one", precisions="amp", loaders="torch", workers=2, repeats=1)
    (row,) = strategies.main(options)["rows"]
    assert (row["precision"], row["loader"], row["error"]) == ("amp", "torch", None)
    assert row["images_per_second"] > 0 and row["to_one"] == 1


def test_a_failure_loses_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four GPUs that are not there: every strategy has its row, its task and its place in the table."""
    tasks: list[TrainTask] = []

    def run(_: Any, task: TrainTask, processes: int, **__: Any) -> Any:
        assert processes == task.world_size
        tasks.append(task)
        if task.strategy == "dp":
            raise MeasurementError("rank 0: Traceback\nout of memory")
        return [measured(100)]

    monkeypatch.setattr("raydali.bench.processes.run_ranks", run)
    with_gpus(monkeypatch, 4)
    files: dict[str, Any] = {"json": str(tmp_path / "s.json")}
    options = replace(OPTIONS, gpus=None, precisions="fp32,amp", loaders="torch,dali", workers=3, **files)
    with pytest.raises(CommandError, match=mentioning("DataParallel 4 amp dali")):
        strategies.main(options)
    written = json.loads(Path(files["json"]).read_text())
    assert written["settings"]["gpus"] == 4
    rows = written["rows"]
    assert [row["strategy"] for row in rows] == [strategy for strategy in STRATEGIES for _ in range(4)]
    assert [row["error"] is not None for row in rows] == [row["strategy"] == "dp" for row in rows]
    assert [row["to_one"] for row in rows] == [None if row["strategy"] == "dp" else 1 for row in rows]
    # DataParallel's one loader makes the batches, and has the threads and workers, of all.
    shapes = {(task.strategy, task.loader): (task.world_size, task.batch_size, task.threads) for task in tasks}
    assert shapes == {
        ("one", "torch"): (1, 4, 3),
        ("one", "raydali"): (1, 4, 1),
        ("dp", "torch"): (1, 16, 12),
        ("dp", "raydali"): (1, 16, 4),
        **{(strategy, "torch"): (4, 4, 3) for strategy in ("ddp", "sync-bn")},
        **{(strategy, "raydali"): (4, 4, 1) for strategy in ("ddp", "sync-bn")},
    }
    assert {(task.strategy, task.gpus) for task in tasks} == {("one", 1), ("dp", 4), ("ddp", 4), ("sync-bn", 4)}
    assert {task.strategy for task in tasks if not task.cuda_graph} == {"dp"}
    assert {(task.gpu, task.precision, task.segments) for task in tasks} == {
        (True, "fp32", ("real",)),
        (True, "fp16", ("real",)),
    }
    # Whole turns of the workers: 12 of DataParallel's make 12 batches at once.
    assert {task.steps for task in tasks if task.loader == "raydali"} == {2}
    assert {(task.strategy, task.steps) for task in tasks if task.loader == "torch"} >= {("one", 3), ("dp", 12)}


@pytest.mark.parametrize(("gpus", "needed"), [(1, "one"), (2, "one,dp,ddp,sync-bn")])
def test_what_needs_several_gpus_is_left_out(
    gpus: int, needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raydali.bench.processes.run_ranks", lambda function, task, *args, **options: [measured(1)])
    with_gpus(monkeypatch, gpus)
    result = strategies.main(replace(OPTIONS, gpus=None))
    assert [row["strategy"] for row in result["rows"]] == needed.split(",")
    said = "left out: DataParallel, DDP, DDP + SyncBatchNorm: they need at least 2 GPUs, and this is on 1 GPU\n"
    assert (said in capsys.readouterr().err) == (gpus == 1)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_figures() -> None:
    row = {name: metric(measured(100)) for name, metric in METRICS.items()}
    assert (row["images_per_second"], row["low"], row["high"], row["repeats"]) == (200, 100, 300, [100, 300])
    assert row["loader_wait_fraction"] == pytest.approx(0.15)


def test_against_one() -> None:
    def row(strategy: str, rate: float | None, loader: str = "dali") -> dict[str, Any]:
        return {"strategy": strategy, "precision": "fp32", "loader": loader, "images_per_second": rate}

    rows = [row("one", 100), row("one", 50, "torch"), row("one", None, "other")]
    for each, rows_, expected in (
        (row("ddp", 350), rows, 3.5),
        (row("ddp", 350, "torch"), rows, 7),
        (row("ddp", 350, "other"), rows, None),
        (row("ddp", None), rows, None),
        (row("ddp", 350), [], None),
    ):
        assert to_one(each, rows_) == {"to_one": expected}


def test_names() -> None:
    assert strategy_name({"strategy": "one", "gpus": 1, "processes": 1}) == "one GPU"
    assert mentions(strategy_name({"strategy": "sync-bn", "gpus": 4, "processes": 4}), "DDP SyncBatchNorm 4 GPUs")
    assert strategy_name({"strategy": "one", "gpus": 0, "processes": 1}) == "one process"


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 0}, "--workers 1 0"),
        ({"loaders": "torch,native"}, "native torch,dali"),
        ({"strategies": "one,fsdp"}, "--strategies fsdp one,dp,ddp,sync-bn"),
        ({"precisions": "bf16"}, "--precisions bf16 fp32,amp"),
        ({"strategies": "dp,sync-bn"}, "--strategies dp,sync-bn 2"),
        ({"model": "resnet51"}, "resnet51 resnet50"),
        ({"gpus": -1}, "--gpus 1,2,4 -1"),
        ({"batch_size": 17}, "32 34 17 --batch-size --make"),
    ],
)
def test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        strategies.main(replace(OPTIONS, **changed))
