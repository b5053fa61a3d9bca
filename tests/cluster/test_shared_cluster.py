"""Runs beside other tenants of a cluster, and beside nodes that cannot train: they go on with what can."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from raydali.data.builtin.digits import digits_folder
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, committed, descendants, kill, name_of, nodes
from tests.support.messages import mentions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TENANT = """
import sys, ray
ray.init(log_to_driver=False)

@ray.remote(num_cpus=1)
class Tenant:
    def here(self):
        return True

held = []
for _ in sys.stdin:
    held.append(Tenant.remote())
    ray.get(held[-1].here.remote())
    print("held", flush=True)
"""


class Run:
    """A job under way, and what it has written so far."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: RunFolder, log: Path) -> None:
        self.process, self.folder, self.log = process, folder, log

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [row for row in self.folder.rows("events.jsonl") if row["event"] in names]

    def wait_for(self, condition: Callable[[], object], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


@contextmanager
def job(using: dict[str, str], tmp_path: Path, *options: str, patch: str = "") -> Iterator[Run]:
    """The image job, with Python that runs in its workers first."""
    script = tmp_path / "patched.py"
    script.write_text(
        "import os\nimport jobs.imagenet as job\nfrom dataclasses import replace\n"
        "from raydali.launch.driver.command import run_job\n"
        "trained = job.train\ndef train(config, data, session):\n"
        f"{textwrap.indent(textwrap.dedent(patch), '    ')}\n    trained(config, data, session)\n"
        "job.train = train\nrun_job(replace(job.JOB, train=job.train))\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, str(script), *options, "--name", "run", "--storage", str(tmp_path), "--no-ceiling"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=using, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Run(process, RunFolder(str(tmp_path), "run"), log)
    finally:
        kill([*descendants(process.pid), process.pid])
        process.wait()


@contextmanager
def tenant(using: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Another driver of the cluster; a call asks for one more CPU for good, without waiting for it."""
    command = [sys.executable, "-c", TENANT]
    process = subprocess.Popen(command, env=using, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def hold(*, wait: bool = False) -> None:
        stdin.write("\n")
        stdin.flush()
        if wait:
            assert stdout.readline() == "held\n"

    try:
        hold(wait=True)
        yield hold
    finally:
        stdin.close()
        process.wait(60)


def trainers(using: dict[str, str]) -> list[int]:
    """Processes of the cluster's training workers."""
    port = ":" + using["RAY_ADDRESS"].rpartition(":")[2]
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in found if "RayTrainWorker" in name_of(pid) and port in raylet_of(pid)]


def raylet_of(pid: int) -> str:
    """The command line of a worker's raylet, empty where the process is gone."""
    try:
        return name_of(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_an_elastic_run_uses_free_gpus_and_grows_without_loss(env: dict[str, str], tmp_path: Path) -> None:
    """3 CPUs, of which others hold one at the start, and two at a restart; then they leave."""
    with nodes(env, tmp_path / "ray", ["3"]) as (using, _), ExitStack() as others:
        hold = others.enter_context(tenant(using))
        with job(using, tmp_path, "--workers", "1:3", "--epochs", "4000") as run:
            run.wait_for(lambda: run.events("start"))
            assert run.events("start")[0]["world_size"] == 2
            assert mentions(run.log.read_text(), "2 of 3 workers")
            run.wait_for(lambda: committed(run.folder))
            hold()
            kill(trainers(using))
            run.wait_for(lambda: run.events("resume"))
            assert run.events("resume")[0]["world_size"] == 1
            others.close()
            run.wait_for(lambda: len(run.events("resume")) == 2)
            (left,), (_, resumed) = run.events("left"), run.events("resume")
            assert (left["notice"], resumed["step"], resumed["world_size"]) == ("resize", left["step"], 3)
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(120) == 130


def test_a_node_whose_failure_recurs_is_left_out(env: dict[str, str], tmp_path: Path) -> None:
    patch = """
    if os.environ.get("NO_GPU_LEFT"):
        raise RuntimeError("CUDA error: the GPU has fallen off the bus")
    """
    options = ["--workers", "1:2", "--epochs", "3"]
    with nodes(env, tmp_path / "ray", ["1"], ["env", "NO_GPU_LEFT=1", "1"]) as (using, ids):
        with job(using, tmp_path, *options, patch=patch) as run:
            assert run.process.wait(400) == 0, run.log.read_text()
        failures = run.events("failure")
        assert [row["left_out"] for row in failures] == [[], [ids[1][:8]]]
        assert [row["world_size"] for row in run.events("start", "resume")] == [1]
        assert mentions(run.log.read_text(), f"warning: no worker node {ids[1][:8]}")


def test_a_node_without_the_data_is_excluded_not_its_samples(env: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    copytree(digits_folder(), data)
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {data} && exec "$@"', "sh"]
    like_the_demo = ["--model", "digits", "--image-size", "32", "--resize-size", "32", "--precision", "fp32"]
    options = [*like_the_demo, "--data", str(data), "--workers", "1:2", "--epochs", "2", "--batch-size", "32"]
    with nodes(env, tmp_path / "ray", ["1"], [*hidden, "1"]) as (using, ids):
        with job(using, tmp_path, *options, "--max-failures", "0") as run:
            assert run.process.wait(400) == 0, run.log.read_text()
        (failure,) = run.events("failure")
        assert (failure["cause"], failure["left_out"]) == ("node", [ids[1][:8]])
        assert not run.events("quarantine")


def test_a_storage_that_is_away_is_waited_for(env: dict[str, str], tmp_path: Path) -> None:
    patch = f"""
    from raydali.errors import StorageAway
    if session.worker.rank == 0 and not os.path.exists({str(tmp_path / "was_away")!r}):
        open({str(tmp_path / "was_away")!r}, "w").close()
        raise StorageAway("s3://bucket/train does not answer: 503")
    """
    with job(env, tmp_path, "--epochs", "2", "--max-failures", "0", patch=patch) as run:
        assert run.process.wait(400) == 0, run.log.read_text()
    (failure,) = run.events("failure")
    assert (failure["cause"], failure["pause"]) == ("storage", 30)
    assert run.events("start")[0]["time"] - failure["time"] > 30


@pytest.mark.parametrize("workers", [3, 2])
def test_the_node_of_a_wrong_rank_is_left_out(env: dict[str, str], tmp_path: Path, workers: int) -> None:
    """Of three ranks, the comparison tells it; of two, the same steps once more do."""
    patch = f"""
    from pathlib import Path
    from tests.support.flipped_bits import plant
    plant(session, rank=1, step=13, where="momentum", once=Path({str(tmp_path / "flipped")!r}))
    """
    options = ["--workers", f"{workers - 1}:{workers}", "--epochs", "3", "--checkpoint-every", "7"]
    options += ["--global-batch-size", "96", "--max-failures", "1"]
    with (
        nodes(env, tmp_path / "ray", *[["1"]] * workers) as (using, ids),
        job(using, tmp_path, *options, patch=patch) as run,
    ):
        assert run.process.wait(400) == 0, run.log.read_text()
    differences, failures = run.events("ranks differ"), run.events("failure")
    assert [(row["step"], row["odd"]) for row in differences] == [(14, []), (14, [1])][workers - 2 :]
    (at_fault,) = [id[:8] for id in ids if id[:8] in differences[-1]["text"]]
    assert [row["left_out"] for row in failures] == [[]] * (len(failures) - 1) + [[at_fault]]
    starts = [(row["step"], row["world_size"]) for row in run.events("start", "resume")]
    assert starts == [(0, workers), *[(7, workers)] * (len(failures) - 1), (7, workers - 1)]
    assert mentions(run.log.read_text(), f"warning: rank 1 wrong {at_fault}")
    assert mentions(run.log.read_text(), f"warning: no worker node {at_fault}")
