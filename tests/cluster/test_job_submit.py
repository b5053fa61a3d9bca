"""`ray job submit` against a running cluster, with a token: the same output, and the right exit status."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from raydali.report.run_folder import RunFolder
from tests.cluster.support import RAY, ROOT, environment, head


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], str]]:
    """The client's environment and the dashboard's address of a one-node cluster with two CPUs."""
    home = tmp_path_factory.mktemp("cluster") / "home"
    home.mkdir()
    token = "0123456789abcdef" * 4
    env = environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_USAGE_STATS_ENABLED="0")
    with head(env, home.parent / "head") as address:
        yield env | {"RAY_ADDRESS": address}, address


def submit(env: dict[str, str], job: str, *arguments: str) -> tuple[int, str]:
    command = [RAY, "job", "submit", "--submission-id", job, "--working-dir", ".", "--"]
    done = subprocess.run(
        [*command, "python", "jobs/imagenet.py", *arguments],
        cwd=ROOT,
        env=env | {"PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


def test_a_submitted_job_trains_tells_and_ends_with_its_status(
    cluster: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    env, address = cluster
    client = JobSubmissionClient(address, headers={"Authorization": f"Bearer {env['RAY_AUTH_TOKEN']}"})

    code, output = submit(env, "trains", "--epochs", "2", "--storage", str(tmp_path), "--name", "submitted")
    assert code == 0, output
    assert "started at step 0 of 44: 2 workers on cpu" in output
    assert output.count("epoch   images images/s") == 1
    assert f"finished: {tmp_path}/submitted" in output
    for noise in ("Traceback", "(RayTrainWorker", "(TrainController", "Failed to query", "FutureWarning"):
        assert noise not in output, output
    assert client.get_job_status("trains") == JobStatus.SUCCEEDED
    assert len(RunFolder(str(tmp_path), "submitted").rows("epochs.jsonl")) == 2

    # More workers than the cluster has: said with both figures.
    code, output = submit(env, "refused", "--workers", "5", "--storage", str(tmp_path), "--name", "refused")
    assert code == 1, output
    assert "5 workers of 1 CPU each were asked for" in output and "1 node, 2 CPUs, 0 GPUs" in output
    assert client.get_job_info("refused").driver_exit_code == 2
    assert client.get_job_status("refused") == JobStatus.FAILED


def test_without_the_token_nobody_gets_in(cluster: tuple[dict[str, str], str]) -> None:
    env, _ = cluster
    without = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run([RAY, "job", "list"], env=without, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "401" in done.stdout + done.stderr or "oken" in done.stdout + done.stderr
