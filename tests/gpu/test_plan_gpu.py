"""Plans on a GPU: energy and memory are measured, the largest micro-batch is found, and one that is too large named.

They fill the memory of the GPU: run no other tests on it at the same time.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raydali.run.folder import RunFolder
from tests.support.pictures import encoded, photograph

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
IMAGES = 2048
"""So many of 512 x 512 pixels fit into no GPU of less than 400 GB."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", IMAGES), ("val", 16)):
        for id in range(count):
            path = root / split / f"class{id % 2}" / f"{id}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(photograph(("china", "flower")[id % 2], (96, 80))))
    return root


def command(*words: object) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)
    return done.returncode, done.stdout + done.stderr


def test_a_plan_has_energy_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, output = command(
        *("-m", "raydali.cli", "plan", "imagenet", "--gpu", "--workers", "1", "--seconds", "5", "--price", "2.5"),
        *("--epochs", "40", "--storage", tmp_path, "--json", file, "--gpus", "2"),
    )
    assert code == 0, output
    found: dict[str, Any] = json.loads(file.read_text())
    one, two = found["gpus"]
    assert (one["gpus"], two["gpus"], one["estimated"], two["estimated"]) == (1, 2, False, True)
    assert found["kwh"] > 0 and found["cost_usd"] > 0 and found["largest_batch_size"] > 64
    assert 0 < found["memory_bytes"] < found["memory_total_bytes"]


def test_the_largest_micro_batch_is_found_and_a_larger_one_refused(images: Path, tmp_path: Path) -> None:
    common = ["jobs/imagenet.py", "--data", images, "--model", "resnet50", "--gpu", "--workers", "1", "--epochs", "1"]
    common += ["--image-size", "512", "--resize-size", "512", "--storage", tmp_path, "--no-ceiling"]
    code, output = command(*common, "--batch-size", "auto", "--name", "auto")
    assert code == 0, output
    folder = RunFolder(str(tmp_path), "auto")
    size = folder.read_json("config.json")["batch_size"]
    assert 16 <= size < IMAGES and size % 8 == 0
    (row,) = folder.rows("epochs.jsonl")
    memory = row["ranks"][0]["memory"]
    assert 0.75 < (memory["peak"] + memory["others"]) / memory["total"] < 1
    ledger = folder.read_json("ledger.json")
    assert ledger["kwh"] > 0 and ledger["mfu"] > 0

    code, output = command(*common, "--batch-size", IMAGES, "--name", "large")
    assert code == 2, output
    told = re.search(rf"--batch-size {IMAGES} does not fit into the GPU's memory: about (\d+) would fit", output)
    assert told is not None, output
    assert 0.5 * size < int(told[1]) < IMAGES
