"""What workers warn of while they train under Ray: said once, with the ranks. And what they say they run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, environment

JOB = """
import jobs.imagenet as job

original = job.train


def train(config, data, session):
    import logging
    import warnings

    from raydali.launch.worker.step import Step

    update, rank = Step.update, session.worker.rank

    def warned(self, *args, **options):
        update(self, *args, **options)
        if not self.is_warm_up and self.index in (5, 6, 30):
            warnings.warn("the loss jumps")
            logging.getLogger("my.job").error("slow disk under %d", rank)
            logging.getLogger("torch._dynamo").warning("compiled again")

    Step.update = warned
    original(config, data, session)


job.train = train
from dataclasses import replace
from raydali.launch.driver.command import run_job
run_job(replace(job.JOB, train=job.train))
"""


@pytest.mark.slow
def test_warnings_of_workers_are_said_once_with_their_ranks(tmp_path: Path) -> None:
    home = tmp_path / "user" / "home"
    home.mkdir(parents=True)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [sys.executable, str(job), "--storage", str(tmp_path), "--name", "run", "--epochs", "3"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = (done.stdout + done.stderr).splitlines()
    line = JOB.partition('warnings.warn("')[0].count("\n") + 1
    for expected in (
        f"warning: ranks 0, 1: UserWarning: the loss jumps ({job}:{line})",
        "warning: rank 0: slow disk under 0 (my.job)",
        "warning: rank 1: slow disk under 1 (my.job)",
        "warning: ranks 0, 1: compiled again (torch._dynamo)",
    ):
        assert said.count(expected) == 1, said
    for word in ("jumps", "under 0", "under 1", "compiled"):
        assert sum(word in text for text in said) == 1, said

    (start,) = (row for row in RunFolder(str(tmp_path), "run").rows("events.jsonl") if row["event"] == "start")
    assert start["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert start["versions"].keys() >= {"python", "ray", "nvidia-dali-cuda120", "raydali"}
    (node,) = start["nodes"]
    assert (node["workers"], node["cores"], node["gpu"]) == (2, len(os.sched_getaffinity(0)), None)
    assert len(node["node"]) == 8
