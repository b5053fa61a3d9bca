"""A file ends the process of its decoder in a run: it is named and replaced, and the run goes on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.imagenet import DIGITS
from raydali.data.broken.quarantine import BrokenSample
from raydali.run.folder import RunFolder
from tests.support.broken import folder
from tests.support.cluster import ROOT
from tests.support.killers import killer
from tests.support.traces import assert_whole
from tests.support.watched_job import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOB = """
import jobs.imagenet as job
from dataclasses import replace
from raydali.launch.driver.command import run_job
true_train = job.train
def train(options, data, session):
    from tests.support.killers import die_of_killers
    die_of_killers()
    true_train(options, data, session)
run_job(replace(job.JOB, train=train))
"""
IN_TRAINING, IN_VALIDATION, SAMPLES = 77, 31, 480


@pytest.mark.parametrize("options", [["--workers", "1"], ["--workers", "2"]])
def test_a_run_goes_on_without_files_that_end_its_decoder(
    options: list[str], env: dict[str, str], tmp_path: Path
) -> None:
    """A restart of the only worker, and of all."""
    data, temporary = tmp_path / "data", tmp_path / "tmp"
    temporary.mkdir()
    train, val = folder(data / "train", SAMPLES, {}), folder(data / "val", 60, {})
    paths = {"training": train.path(IN_TRAINING), "validation": val.path(IN_VALIDATION)}
    for path in paths.values():
        Path(path).write_bytes(killer())
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), "--data", str(data), "--model", "digits", "--image-size", "32"]
    command += ["--batch-size", "16", "--global-batch-size", "32", "--epochs", "2", "--loader", "dali"]
    command += ["--trace-samples", "--name", "run", "--storage", str(tmp_path / "runs"), *options]
    env = env | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder(str(tmp_path / "runs"), "run")
    found = {
        row["of"]: BrokenSample(*(row[name] for name in ("id", "path", "reason", "replaced_by")))
        for row in events(run, "quarantine")
    }
    assert {of: each.path for of, each in found.items()} == paths
    assert all("has ended (SIG" in each.reason for each in found.values())
    losses = events(run, "failure", "replace")
    assert 1 <= len(losses) <= 2 and all("it crashed: SIG" in row["error"] for row in losses), losses
    assert {row["event"] for row in losses} == {"replace" if options == ["--workers", "2"] else "failure"}
    assert all(row.get("pause", 0) == 0 for row in losses)
    assert run.rows("epochs.jsonl")[1]["quarantined"] == 1
    assert_whole(run, replace(DIGITS, epochs=2, global_batch_size=32, batch_size=16).stream(SAMPLES))
    assert not [*temporary.glob("raydali-in-flight-*/*")], "notes are removed"
