"""`ray job submit` against a running cluster, with a token: the same output, and the right exit status."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raydali.commands.cluster import HEAD_ENVIRONMENT
from raydali.run.folder import RunFolder
from tests.support.cluster import RAY, ROOT, committed, environment, head
from tests.support.messages import mentions

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], str]]:
    """The client's environment and the dashboard's address of a one-node cluster with two CPUs."""
    home = tmp_path_factory.mktemp("cluster") / "home"
    home.mkdir()
    token = "0123456789abcdef" * 4
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    env = environment(home, **ray, **HEAD_ENVIRONMENT)
    with head(env, home.parent / "head") as address:
        yield env | {"RAY_ADDRESS": address}, address


def client_of(address: str, env: dict[str, str]) -> "JobSubmissionClient":
    from ray.job_submission import JobSubmissionClient  # takes half a second

    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {env['RAY_AUTH_TOKEN']}"})


def submit(
    env: dict[str, str],
    job: str,
    *arguments: str,
    program: str = "python jobs/imagenet.py",
    folder: Path = ROOT,
    wait: bool = True,
) -> tuple[int, str]:
    command = [RAY, "job", "submit", "--submission-id", job, "--working-dir", ".", *([] if wait else ["--no-wait"])]
    done = subprocess.run(
        [*command, "--", *program.split(), *arguments],
        cwd=folder,
        env=env | {"PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_submitted_job_trains_tells_and_ends_with_its_status(
    cluster: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    env, address = cluster
    client = client_of(address, env)

    code, output = submit(env, "trains", "--epochs", "2", "--storage", str(tmp_path), "--name", "submitted")
    assert code == 0, output
    assert mentions(output, "step 0 44 2 workers cpu")
    assert output.count("epoch   images images/s") == 1
    assert f"finished: {tmp_path}/submitted" in output
    for noise in ("Traceback", "(RayTrainWorker", "(TrainController", "Failed to query", "FutureWarning"):
        assert noise not in output, output
    assert client.get_job_status("trains") == "SUCCEEDED"
    assert len(RunFolder(str(tmp_path), "submitted").rows("epochs.jsonl")) == 2

    # More workers than the cluster has: said with both figures.
    code, output = submit(env, "refused", "--workers", "5", "--storage", str(tmp_path), "--name", "refused")
    assert code == 1, output
    assert mentions(output, "5 workers 1 CPU") and mentions(output, "1 node 2 CPUs 0 GPUs")
    assert client.get_job_info("refused").driver_exit_code == 2
    assert client.get_job_status("refused") == "FAILED"


NETS = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
"""


@pytest.mark.slow
def test_raydali_train_is_submitted_from_any_folder(cluster: tuple[dict[str, str], str], tmp_path: Path) -> None:
    """Driver and workers import the model from the submitted folder; raydali and its job are installed."""
    env, _ = cluster
    (folder := tmp_path / "project").mkdir()
    (folder / "mynets.py").write_text(NETS)
    options = ["--model", "mynets:build", "--epochs", "1", "--storage", str(tmp_path), "--name", "installed"]
    code, output = submit(env, "installed", *options, program="raydali train imagenet", folder=folder)
    assert code == 0 and f"finished: {tmp_path}/installed" in output, output
    assert mentions(output, "2 workers cpu")


SLOW_SAVES = """
import time
import torch
import jobs.imagenet as job
from dataclasses import replace
from raydali.launch.driver.command import run_job
train = job.train
def slowly(*given):
    save = torch.save
    torch.save = lambda *a, **k: (time.sleep(4), save(*a, **k))
    train(*given)
job.train = slowly
run_job(replace(job.JOB, train=job.train))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_stopped_leaves_a_checkpoint(cluster: tuple[dict[str, str], str], tmp_path: Path) -> None:
    """A save takes 4 s, as those of large models to object stores do; by itself Ray kills what is there after 3."""
    env, address = cluster
    client = client_of(address, env)
    (script := tmp_path / "slow.py").write_text(SLOW_SAVES)
    options = ["--workers", "1", "--epochs", "200", "--storage", str(tmp_path), "--name", "stopped"]
    code, output = submit(env, "stopped", *options, program=f"python {script}", wait=False)
    assert code == 0, output
    folder = RunFolder(str(tmp_path), "stopped")

    def events(name: str) -> list[dict[str, object]]:
        return [row for row in folder.rows("events.jsonl") if row["event"] == name]

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, client.get_job_logs("stopped")
            time.sleep(0.2)

    wait_for(lambda: bool(events("start")))
    assert client.stop_job("stopped")
    wait_for(lambda: client.get_job_status("stopped").is_terminal())
    assert client.get_job_status("stopped") == "STOPPED"
    (left,) = events("left")
    assert len(events("interrupt")) == 1
    assert left["step"] == committed(folder) > 0
    assert "Interrupted after" in (tmp_path / "stopped/report.html").read_text()
