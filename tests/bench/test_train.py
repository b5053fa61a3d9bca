"""`bench train` on the CPU: rows, files, and refusals.

No test asserts how near anything comes to its ceiling.
"""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydali.bench import processes, train, train_rank
from raydali.bench.processes import run_ranks
from raydali.bench.synthetic import write_images
from raydali.bench.train import METRICS, TrainBench, against_one_gpu
from raydali.bench.train_rank import TrainTask, measure
from raydali.data.index.labeled import LabeledFiles
from raydali.errors import UsageError
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker
from tests.support.messages import mentioning
from tests.support.ranks import CPU
from tests.support.ranks import run_ranks as run_gloo_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = TrainBench(
    make=64,
    gpus="0",
    models="digits",
    loaders="raydali,synthetic",
    batch_size=8,
    image_size=32,
    threads=1,
    precision="fp32",
    steps=2,
    repeats=2,
)
TASK = TrainTask(
    loader="native",
    root="",
    batch_size=4,
    image_size=32,
    threads=1,
    workers=1,
    seconds=0,
    gpus=0,
    model="digits",
    steps=2,
    rounds=1,
    precision="fp32",
)


# ---------------------------------------------------------------------------------------------------------------------
# Measured


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_measures_each_combination(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files: dict[str, Any] = {"json": str(tmp_path / "train.json")}
    result = train.main(replace(OPTIONS, **files))
    assert json.loads(Path(files["json"]).read_text()) == result
    assert result["command"] == "bench train"
    assert result["settings"]["images"] == 64
    assert [(row["model"], row["loader"], row["gpus"]) for row in result["rows"]] == [
        ("digits", "raydali", 0),
        ("digits", "synthetic", 0),
    ]
    for row in result["rows"]:
        assert row["error"] is None
        assert set(METRICS) < set(row)
        assert len(row["rounds"]) == 2
        ratios = []
        for each in row["rounds"]:
            assert list(each) == ["ceiling", "real", "alone"]
            assert all(0 < stretch["images_per_second"] < math.inf for stretch in each.values())
            assert 0 < each["real"]["loader_wait_fraction"] < 1
            ratios.append(each["real"]["images_per_second"] / each["ceiling"]["images_per_second"])
        assert row["of_ceiling"] == statistics.median(ratios)
        assert (row["of_ceiling_low"], row["of_ceiling_high"]) == (min(ratios), max(ratios))
        assert row["scaling"] is None
    out = capfd.readouterr().out
    assert "digits, raydali, CPU: " in out
    assert "real / ceiling" in out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "shard"])
def test_ranks_train_together_and_end_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], strategy: Any
) -> None:
    ended: list[str] = []

    def recorded(process: Any) -> None:
        kill(process)
        ended.append(process.name)

    kill = processes._kill
    monkeypatch.setattr(processes, "_kill", recorded)
    write_images(str(tmp_path), 16)
    given: dict[str, Any] = {"world_size": 2, "compile": True, "cuda_graph": True, "optimizer": "adamw"}
    task = replace(TASK, root=str(tmp_path), strategy=strategy, **given)
    measured, _ = run_ranks(measure, task, 2, timeout=200)
    assert ended == ["rank 1", "rank 0"]  # rank 0 has the store, whose loss others would report
    assert not capfd.readouterr().err
    assert [list(each) for each in measured["rounds"]] == [["ceiling", "real", "alone"]]
    assert METRICS["real_images_per_second"](measured) > 0


def gradients_of_zero(task: TrainTask, shard: bool) -> list[str]:
    """The weights whose gradients are zero in a step."""
    worker, precision = Worker.join(CPU, cpus=1, node="local"), Precision("fp32", CPU)
    task = replace(task, world_size=worker.world_size, rank=worker.rank, strategy="shard" if shard else "ddp")
    source = LabeledFiles.scan(task.root)
    feed = train_rank.Feed(task, source, precision)
    _, forward_backward = train_rank._make_step(task, feed, source, worker, precision)
    forward_backward(*feed.resident)
    of_all = forward_backward._model.named_parameters()
    return [name for name, each in of_all if each.grad is None or not each.grad.any()]


@pytest.mark.parametrize("shard", [pytest.param(True, marks=pytest.mark.slow), False])
def test_gradients_are_as_in_training_though_the_head_starts_at_zero(tmp_path: Path, shard: bool) -> None:
    write_images(str(tmp_path), 16)
    task = replace(TASK, root=str(tmp_path), loader="synthetic", batch_size=2, model="vit_b_16")
    assert run_gloo_ranks(2 if shard else 1, gradients_of_zero, task, shard) == [[], []][: 1 + shard]


def test_against_one_gpu() -> None:
    def row(gpus: int, ceiling: float, real: float, **changed: Any) -> dict[str, Any]:
        figures = {"ceiling_images_per_second": ceiling, "real_images_per_second": real, "error": None}
        same = {"model": "a", "loader": "b", "micro_batches": 1, "network": "whole"}
        return {**same, "gpus": gpus, **figures, **changed}

    one, four = row(1, 1000, 950), row(4, 3600, 3420)
    assert against_one_gpu(four, [one, four]) == {"scaling": pytest.approx(3.6), "communication": pytest.approx(0.1)}
    assert against_one_gpu(one, [one]) == {"scaling": 1, "communication": 0}
    nothing = {"scaling": None, "communication": None}
    assert against_one_gpu(four, [four, row(1, 1, 1, loader="c"), row(1, 1, 1, error="oh")]) == nothing
    assert against_one_gpu(four, [four, row(1, 1000, 950, micro_batches=3)]) == nothing
    assert against_one_gpu(four, [four, row(1, 1000, 950, network="sharded")]) == nothing
    assert against_one_gpu(row(0, 10, 9), [row(0, 10, 9), one]) == nothing


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "--steps 1 0"),
        ({"batch_size": -1}, "--batch-size 1 -1"),
        ({"make": 0}, "--make 1 0"),
        ({"timeout": 0.0}, "--timeout 0"),
        ({"loaders": "raydali,nativ"}, "nativ raydali,native,torchvision,synthetic"),
        ({"loaders": ","}, "--loaders"),
        ({"models": ""}, "--models"),
        ({"networks": "whole,split"}, "split whole,sharded,whole+recomputed,sharded+recomputed"),
        ({"networks": "sharded", "precision": "fp16"}, "--networks sharded --precision fp16"),
        ({"models": "resnet51"}, "resnet51 resnet50"),
        ({"micro_batches": "3,0"}, "--micro-batches 1,3 3,0"),
        ({"gpus": "two"}, "--gpus 1,2,4 two"),
        ({"gpus": "0,1000"}, "--gpus 0,1000"),
        ({"batch_size": 65}, "64 65 --batch-size --make"),
        ({"data": "s3://bucket/folder", "loaders": "raydali,native"}, "s3://bucket/folder"),
        ({"data": "/nowhere"}, "/nowhere"),
        ({"json": "/nowhere/train.json"}, "--json /nowhere/train.json"),
        ({"fused": True, "compile": False}, "--fused --compile"),
    ],
)
def test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        train.main(replace(OPTIONS, **changed))
