"""A copy of a job with a mistake in its loop, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_loop_that_stops_early_ends_the_run_with_an_error(tmp_path: Path) -> None:
    job = tmp_path / "own_job.py"
    text = (ROOT / "jobs/imagenet.py").read_text()
    update = "            step.update(optimizer, ema, max_norm=config.clip_grad)\n"
    assert text.count(update) == 1
    job.write_text(text.replace(update, update + "            if step.index == 3:\n                break\n"))
    command = [sys.executable, str(job), "--storage", str(tmp_path / "runs"), "--no-ceiling", "--workers", "1"]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "run.steps" in ended.stderr and "Traceback" not in ended.stderr
