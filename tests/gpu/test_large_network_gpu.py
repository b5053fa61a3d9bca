"""A billion weights on GPUs with little memory: DDP runs out of it; shards train, are killed, and go on."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, committed, descendants, finished_run, kill, run_job, start_job
from tests.support.copied_jobs import changed_copy
from tests.support.planted import pictures
from tests.support.traces import read_samples
from tests.support.watched_job import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
IMPORT = "    import torch\n"
CAP = f"{IMPORT}\n    torch.cuda.set_per_process_memory_fraction({14 * 2**30} / torch.cuda.mem_get_info()[1])\n"
IMAGES = 256
OPTIONS = ["--model", "timm:vit_giant_patch14_224", "--optimizer", "adamw", "--activation-checkpointing", "--gpu"]


def test_a_network_larger_than_a_gpu_goes_on_with_any_number(tmp_path: Path) -> None:
    capped = str(changed_copy("imagenet", {IMPORT: CAP}, tmp_path))
    pictures(tmp_path / "data", train=IMAGES, val=16)
    options = [*OPTIONS, "--data", str(tmp_path / "data"), "--global-batch-size", "32", "--batch-size", "16"]
    options += ["--epochs", "2", "--trace-samples", "--no-ceiling"]
    of_all = [*options, "--storage", str(tmp_path), "--workers", "2"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    code, output = run_job(*of_all, "--name", "whole", env=env, log=tmp_path / "whole.log", script=capped)
    assert code == 2 and "--shard" in output, output
    sharded = [*of_all, "--name", "run", "--shard", "--checkpoint-every", "4"]
    folder, process = RunFolder(str(tmp_path), "run"), start_job(*sharded, env=env, log=tmp_path / "log", script=capped)
    try:
        wait_for(lambda: committed(folder) >= 4, process, tmp_path)
    finally:
        kill([*descendants(process.pid), process.pid])
        process.wait()
    assert 4 <= committed(folder) < IMAGES / 32, "it was killed too late to go on"
    finished_run(tmp_path, "run", *options, "--workers", "2", "--shard", "--stop-after", "1", script=capped)
    finished_run(tmp_path, "run", *options, "--workers", "1")
    rows = read_samples(folder)
    ids = Counter(zip(rows["epoch"].to_pylist(), rows["id"].to_pylist(), strict=True))
    assert ids == Counter((epoch, image) for epoch in range(2) for image in range(IMAGES))
    assert {*zip(rows["epoch"].to_pylist(), rows["rank"].to_pylist(), strict=True)} == {(0, 0), (0, 1), (1, 0)}
