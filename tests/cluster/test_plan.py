"""`raydali plan` of real jobs: what it finds, and that it leaves nothing behind."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raydali.commands.jobs import Plan, main
from raydali.errors import UsageError
from raydali.launch.driver.plan import compiled_anew
from raydali.run.folder import RunFolder
from tests.support.cluster import environment
from tests.support.messages import mentions
from tests.support.pictures import encoded, photograph

RAYDALI = str(Path(sys.executable).with_name("raydali"))


def plan(env: dict[str, str], *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([RAYDALI, "plan", *options], env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    return environment(tmp_path / "home")


@pytest.mark.slow
def test_a_plan_names_all_figures_and_writes_nothing_to_the_run(env: dict[str, str], tmp_path: Path) -> None:
    storage, options = tmp_path / "runs", ["--epochs", "80", "--validate-every", "4", "--price", "3.6"]
    options += ["--stop-after", "40", "--patience", "99"]
    before = {"config.json": b'{"form": 1}'}
    (storage / "mine").mkdir(parents=True)
    (storage / "mine/config.json").write_bytes(before["config.json"])
    result = plan(
        env, "imagenet", "--storage", str(storage), "--name", "mine", *options, "--seconds", "10", "--json", "-"
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert {path.name: path.read_bytes() for path in (storage / "mine").iterdir()} == before
    assert [path.name for path in storage.iterdir() if path.name.startswith("plan")] == []
    assert found["run_seconds"] > 40 * found["epoch_seconds"] > 0
    held = found["cost_usd"] * 1000 / 2  # at a thousandth of a USD a second
    assert found["run_seconds"] - found["measured"]["start_seconds"] < held < found["run_seconds"]
    assert found["goodput"] is None or 0 < found["goodput"] < 1
    assert found["kwh"] is None and found["largest_batch_size"] is None and found["memory_bytes"] > 1e8
    (row,) = found["gpus"]
    assert row["workers"] == 2 and row["gpus"] == 0 and row["run_seconds"] == found["run_seconds"]
    assert found["disk_bytes"] > 1e6 and found["bottleneck"]["cause"]
    assert "2 workers on CPUs" in result.stderr and mentions(result.stderr, "--stop-after 40 80")
    assert mentions(result.stderr, "--patience 99 earlier") and "memory of a worker" in result.stderr
    began = time.monotonic()
    (storage / "mine/config.json").unlink()
    job = [sys.executable, "jobs/imagenet.py", "--storage", str(storage), "--name", "mine", *options]
    run = subprocess.run(job, env=env, capture_output=True, text=True, timeout=600)
    took = time.monotonic() - began
    assert run.returncode == 0, run.stderr
    assert took == pytest.approx(found["run_seconds"], rel=0.5)  # other tests load the machine
    rows = RunFolder(str(storage), "mine").rows("epochs.jsonl")
    assert [row["epoch"] for row in rows if row["validation"] is not None] == list(range(3, 40, 4))
    kept, best = (sum(file.stat().st_size for file in storage.glob(f"mine/{of}/*")) for of in ("checkpoint_*", "best"))
    assert found["disk_bytes"] == pytest.approx(kept * 4 / 3 + best, rel=0.1)  # one more before the oldest is deleted


@pytest.mark.slow
def test_a_plan_starts_as_the_run_will_that_finds_the_compiled_code(env: dict[str, str], tmp_path: Path) -> None:
    env = {**env, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    file, options = tmp_path / "plan.json", ("--workers", "1", "--compile", "--epochs", "5")
    result = plan(env, "imagenet", "--storage", str(tmp_path), *options, "--seconds", "5", "--json", str(file))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("training once more") == 1
    found = json.loads(file.read_text())
    assert found["goodput"] is not None  # the ceiling of compiled code was measured
    run = [sys.executable, "jobs/imagenet.py", "--storage", str(tmp_path), "--name", "mine", *options]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ledger = RunFolder(str(tmp_path), "mine").read_json("ledger.json")
    assert ledger["starting"]["compile"] < 10
    begun = ledger["groups"][0]["begun"] - ledger["since"]
    assert found["measured"]["start_seconds"] < begun + 10  # to compile takes longer


@pytest.mark.slow
def test_a_validation_ends_early_and_an_epoch_too(env: dict[str, str], tmp_path: Path) -> None:
    """An epoch of a minute is not waited for, nor its validation."""
    for split, images in (("train", 1000), ("val", 1000)):
        for i in range(images):
            path = tmp_path / "data" / split / str(i % 2) / f"{i:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if i < 2:
                path.write_bytes(encoded(photograph(size=(160 + i, 120))))
            else:
                path.hardlink_to(tmp_path / "data" / split / str(i % 2) / f"{i % 2:04}.jpg")
    options = ["--data", str(tmp_path / "data"), "--storage", str(tmp_path), "--model", "resnet18"]
    options += ["--image-size", "96", "--batch-size", "16", "--epochs", "5"]
    result = plan(env, "imagenet", *options, "--seconds", "12", "--json", str(tmp_path / "plan.json"))
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["measured"]["steps"] < 5 * 1000 / 32
    assert found["epoch_seconds"] > 1000 / 32 * found["measured"]["step_seconds"]
    assert not [*tmp_path.glob("plan-*")]


def test_a_slow_first_step_is_no_compilation() -> None:
    assert not compiled_anew({"compile": False}, {"compile": 60.0})
    assert compiled_anew({"compile": True}, {"compile": 60.0})
    assert not compiled_anew({"compile": True}, {"compile": 3.0})


def test_bad_usage_is_refused_before_the_job_starts() -> None:
    for given, message in (
        (Plan(), "plan needs a job: "),
        (Plan(job="imagenet", seconds=3), "--seconds must be from 5 to 90, not 3"),
        (Plan(job="imagenet", gpus=0), "--gpus must be at least 1, not 0"),
        (Plan(job="imagenet", bandwidth=0), "--bandwidth must be above 0 GB/s, not 0"),
        (Plan(job="imagenett"), "imagenett is neither a job of raydali nor a file: try imagenet"),
        (Plan(job="imagenet", json="/nowhere/plan.json"), "--json"),
    ):
        with pytest.raises(UsageError, match=message):
            main(given)


def test_a_job_that_cannot_be_planned_is_refused_before_anything_starts(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import raydali\n\nraydali.run_main(print)\n")
    result = plan(env, str(tmp_path / "mine.py"), "--data", "x")
    assert result.returncode == 2 and "error: mine.py has no JOB that raydali could plan" in result.stderr
