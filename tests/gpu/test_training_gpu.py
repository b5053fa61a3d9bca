"""The job on GPUs, by real runs on the digits: compiled, in each precision, with NCCL and SyncBatchNorm."""

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.imagenet import DIGITS
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles
from raydali.run.folder import RunFolder
from tests.support.cluster import finished_run
from tests.support.traces import assert_whole

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(storage: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """The epochs of a run of 8 epochs at global batches of 128."""
    common = ["--epochs", "8", "--global-batch-size", "128", "--batch-size", "64", "--trace-samples"]
    return finished_run(storage, name, *common, *options).rows("epochs.jsonl")


@pytest.mark.parametrize(
    "options",
    ["--precision bf16 --compile", "--precision fp16", "--precision fp32 --ema-decay 0.9 --mixup 0.1"],
)
def test_one_gpu_learns_the_digits(tmp_path: Path, options: str) -> None:
    last = train(tmp_path, "one", "--gpu", "--workers", "1", *options.split())[-1]
    assert last["validation"]["top1"] > 0.9
    assert last["loader_wait_seconds"] >= 0 and last["step_seconds"] > 0
    assert last["seconds"] == pytest.approx(last["ranks"][0]["seconds"])
    assert last["flops_per_image"] == 15_048_192  # as tests/measure/test_flops.py counts by hand
    peak = last["ranks"][0]["peak_flops"]
    assert last["mfu"] is None if peak is None else 0 < last["mfu"] < 1


def test_one_gpu_learns_two_labels_of_each_digit(tmp_path: Path) -> None:
    for part in ("train", "val"):
        files = LabeledFiles.scan(f"{digits_folder()}/{part}")
        rows = [f"{files.path(id)},{int(label % 2 == 0)},{int(label > 4)}" for id, label in enumerate(files.labels)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["path,even,large", *rows]))
    options = f"--data {tmp_path}/train.csv --val-data {tmp_path}/val.csv --multi-label --class-weights balanced"
    options += " --model digits --image-size 32 --resize-size 32 --learning-rate 0.1 --cutmix 0.2 --flip-probability 0"
    last = train(tmp_path, "several", "--gpu", "--workers", "1", *options.split())[-1]
    assert last["validation"]["map"] > 0.85 and last["validation"]["accuracy"] > 0.7


@two_gpus
@pytest.mark.parametrize("options", ["--precision bf16 --compile", "--precision fp16 --sync-bn --ema-decay 0.9"])
def test_two_gpus_share_global_batches_over_nccl(tmp_path: Path, options: str) -> None:
    rows = train(tmp_path, "two", "--gpu", "--workers", "2", *options.split())
    assert rows[-1]["validation"]["top1"] > 0.9
    assert [rank["world_size"] for rank in rows[-1]["ranks"]] == [2, 2]
    stream = type(DIGITS)(epochs=8, batch_size=64, global_batch_size=128).stream(1437)
    assert_whole(RunFolder(str(tmp_path), "two"), stream)


@two_gpus
def test_losses_are_the_same_on_one_and_two_gpus(tmp_path: Path) -> None:
    losses = [
        train(tmp_path, f"on-{workers}", "--workers", str(workers), "--precision", "fp32")[0]["loss"]
        for workers in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@two_gpus
@pytest.mark.parametrize(
    "options",
    [
        "--precision bf16 --compile --sync-bn",
        "--precision fp16 --sync-bn --ema-decay 0.9 --clip-grad 1",
        "--optimizer adamw --mixup 0.2 --clip-grad 1",
        "--optimizer muon --compile",
    ],
)
def test_two_gpus_never_differ(tmp_path: Path, options: str) -> None:
    common = ["--epochs", "60", "--global-batch-size", "128", "--batch-size", "64", "--checkpoint-every", "5"]
    run = finished_run(tmp_path, "two", "--gpu", "--workers", "2", *common, *options.split())
    rows = run.rows("events.jsonl")
    assert not [row for row in rows if row["event"] in ("ranks differ", "failure")]
    assert len([row for row in rows if row["event"] == "start"]) == 1
