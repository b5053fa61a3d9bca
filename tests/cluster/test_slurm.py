"""Jobs in a real Slurm with two nodes, by cluster/slurm.sh."""

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raydali.run.folder import RunFolder
from tests.support.cluster import RAY, ROOT, committed
from tests.support.slurm import GPUS, Slurm, slurm

SCRIPT = "cluster/slurm.sh"
JOB = [SCRIPT, "imagenet", "--epochs", "20", "--checkpoint-every", "10", "--no-ceiling", "--cpus-per-worker", "1"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture
def env(env: dict[str, str]) -> dict[str, str]:
    return env | {"PATH": f"{Path(RAY).parent}:{env['PATH']}"}


@pytest.fixture
def cluster(tmp_path: Path, env: dict[str, str]) -> Iterator[Slurm]:
    """Once its jobs have ended, nothing of them is left."""
    folders = set(Path("/tmp").glob("ray-slurm-*"))
    with slurm(2, tmp_path / "slurm", env) as it:
        yield it
        processes = it.processes()
    left = set(Path("/tmp").glob("ray-slurm-*")) - folders
    for path in left:
        shutil.rmtree(path)
    assert not left and not processes


def submit(cluster: Slurm, env: dict[str, str], *command: str) -> str:
    """`sbatch` with this command's options, script and arguments; the id of the job."""
    log = cluster.config.parent / "%j.log"
    done = cluster.run("sbatch", "--parsable", f"--output={log}", *command, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until(condition: Callable[[], object], log: Path, seconds: float = 800) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_reaches_its_time_limit_is_requeued_and_resumes(
    cluster: Slurm, env: dict[str, str], tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    job = submit(cluster, env, "--nodes=2", "--cpus-per-task=2", *JOB, "--workers=3", "--storage", str(storage))
    folder, log = RunFolder(str(storage), f"slurm-{job}"), cluster.config.parent / f"{job}.log"
    wait_until(lambda: committed(folder) or cluster.job(job, env)["JobState"] in ENDED, log)
    limit = re.search(r"^#SBATCH --signal=B:(\w+)@", (ROOT / SCRIPT).read_text(), re.MULTILINE)
    assert limit
    done = cluster.run("scancel", "--batch", f"--signal={limit[1]}", job, env=env)
    assert done.returncode == 0, done.stderr

    wait_until(lambda: cluster.job(job, env)["JobState"] in ENDED, log)
    record, said = cluster.job(job, env), log.read_text()
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("COMPLETED", "0:0", "1"), said
    assert f"finished: {folder}: " in said.splitlines()[-1], said
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == list(range(20))
    assert sorted(Counter(rank["node"] for rank in rows[-1]["ranks"]).values()) == [1, 2]
    events = [row["event"] for row in folder.rows("events.jsonl")]
    assert [event for event in events if event in ("start", "interrupt", "resume", "finish")] == [
        "start",
        "interrupt",
        "resume",
        "finish",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_jobs_share_a_node_and_end_with_the_codes_of_their_drivers(
    cluster: Slurm, env: dict[str, str], tmp_path: Path
) -> None:
    folder = RunFolder(str(tmp_path / "runs"), "digits")
    node = f"--nodelist={cluster.hosts[0].name}"
    options = ["--workers=1", "--epochs=5000", "--name=digits", "--storage", str(tmp_path / "runs")]
    long = submit(cluster, env, node, *JOB, *options)
    log = cluster.config.parent / f"{long}.log"
    wait_until(lambda: committed(folder) or cluster.job(long, env)["JobState"] in ENDED, log)

    gpus = f"--gpus-per-node={len(GPUS)}"
    refused = submit(cluster, env, node, gpus, *JOB, "--workers=9", "--storage", str(tmp_path / "runs"))
    other = cluster.config.parent / f"{refused}.log"
    wait_until(lambda: cluster.job(refused, env)["JobState"] in ENDED, other)
    assert cluster.job(refused, env)["ExitCode"] == "2:0", other.read_text()
    # What Slurm has given to the job is what Ray has: 1 CPU by default.
    assert f"1 node, 1 CPU, {len(GPUS)} GPUs" in other.read_text().splitlines()[-1], other.read_text()

    assert cluster.job(long, env)["JobState"] == "RUNNING", log.read_text()
    before = committed(folder)
    wait_until(lambda: committed(folder) > before, log)
    assert cluster.run("scancel", "--batch", "--signal=TERM", long, env=env).returncode == 0
    wait_until(lambda: cluster.job(long, env)["JobState"] in ENDED, log)
    record = cluster.job(long, env)
    assert (record["ExitCode"], record["Restarts"]) == ("130:0", "0"), log.read_text()
    assert folder.rows("events.jsonl")[-1]["event"] == "interrupt"


def test_the_script_has_no_warnings_of_shellcheck() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("needs the program shellcheck: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", ROOT / SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
