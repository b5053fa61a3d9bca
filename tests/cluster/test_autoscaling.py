"""`raydali cluster`: up, status, down, and jobs that make it grow. GPUs are declared only."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydali.commands.cluster import STANDARD, Up, main
from raydali.errors import UsageError
from raydali.host import cluster_processes
from raydali.run.folder import RunFolder
from tests.support.cluster import RAY, ROOT, descendants, environment, name_of
from tests.support.messages import mentions

Cluster = tuple[str, dict[str, str]]
"""The folder of a cluster, and the environment of those who use it."""
IDLE_SECONDS = 15
ON_TWO_NODES = """
import os
import ray

@ray.remote(num_gpus=1)
class Process:
    def folder(self):
        return os.getcwd()

ray.init()
first = Process.remote()
folder = ray.get(first.folder.remote())
second = Process.remote()
print("the second is in", ray.get(second.folder.remote()))
assert ray.get(first.folder.remote()) == folder
"""


def raydali(*arguments: str, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a `raydali` command."""
    return ended([sys.executable, "-m", "raydali.cli", *arguments], env)


def ended(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=600, **streams)
    return done.returncode, done.stdout


def processes_of(folder: str) -> list[int]:
    """Whose command lines name the cluster's folder, and all below them."""
    named = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid() and f"{folder}/" in name_of(int(entry.name))
    ]
    return sorted({*named, *(below for pid in named for below in descendants(pid))})


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("cluster") / "home"
    home.mkdir()
    return environment(home)


@pytest.fixture(scope="module")
def shared(env: dict[str, str]) -> Iterator[Cluster]:
    """A cluster that may grow to four nodes, which the last test that uses it takes down."""
    folder, file = f"/tmp/rdt-{os.getpid()}-shared", Path(env["HOME"]) / "shared.yaml"
    config = yaml.safe_load(STANDARD.read_text())
    config["idle_timeout_minutes"] = IDLE_SECONDS / 60
    config["max_workers"] = config["available_node_types"]["gpu"]["max_workers"] = 4
    file.write_text(yaml.safe_dump(config))
    ports = [f"--{option}=0" for option in ("port", "dashboard-port", "client-port")]
    try:
        code, output = raydali("cluster", "up", "--folder", folder, "--file", str(file), *ports, env=env)
        assert code == 0, output
        assert f"source {folder}/env" in output
        yield folder, env | exported(folder)
    finally:
        raydali("cluster", "down", "--folder", folder, env=env)


def exported(folder: str) -> dict[str, str]:
    """What `source FOLDER/env` puts into a shell."""
    shell = ["bash", "-c", f"source {folder}/env && env"]
    lines = subprocess.run(shell, env={}, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines) | {"PATH": f"{Path(RAY).parent}:{os.environ['PATH']}"}


def submit(env: dict[str, str], *arguments: str, wait: bool = True) -> tuple[int, str]:
    """`ray job submit` of the image job."""
    command = [RAY, "job", "submit", *([] if wait else ["--no-wait"]), "--working-dir", ".", "--"]
    return ended([*command, "python", "jobs/imagenet.py", *arguments], env | {"PYTHONPATH": ""})


def nodes_of(env: dict[str, str], folder: str) -> int:
    """Nodes beside the head, by `raydali cluster status`."""
    code, output = raydali("cluster", "status", "--folder", folder, env=env)
    assert code == 0, output
    return sum(line.startswith("node ") for line in output.splitlines())


def wait_for(condition: Callable[[], bool], *, seconds: float, why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for option, value, words in (
            ("file", str(ROOT / "cluster/aws.yaml"), "--file aws.yaml several ray up"),
            ("file", __file__, f"--file {__file__} cluster.yaml"),
            ("port", port, f"{port} --port"),
            ("folder", str(tmp_path), f"--folder {tmp_path}"),
        ):
            options: dict[str, Any] = {"folder": str(tmp_path), "port": 0, "dashboard_port": 0, "client_port": 0}
            with pytest.raises(UsageError) as refused:
                main(Up(**options | {option: value}))
            assert mentions(str(refused.value), words), refused.value


@pytest.mark.slow
def test_the_status_and_what_is_refused(env: dict[str, str], shared: Cluster, tmp_path: Path) -> None:
    folder, using = shared
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    code, output = raydali("cluster", "status", "--folder", folder, env=env)
    assert code == 0 and "head" in output and using["RAY_ADDRESS"] in output, output
    code, output = raydali("cluster", "status", "--folder", folder, "--json", "-", env=env)
    assert json.loads(output[output.index("{") :])["nodes"][0]["head"], output
    code, output = raydali("cluster", "up", "--folder", folder, env=env)
    assert code == 2 and mentions(output, f"{folder} --folder"), output

    stranger = {name: value for name, value in using.items() if not name.startswith("RAY_AUTH")}
    listed = subprocess.run([RAY, "job", "list"], env=stranger, capture_output=True, timeout=300)
    assert listed.returncode != 0

    # Impossible: said with both figures and what would fit.
    code, output = submit(using, "--workers", "9", "--storage", str(tmp_path / "runs"))
    assert code == 1, output
    assert mentions(output, "9 workers 2 CPUs 1 GPU"), output
    assert mentions(output, "4 2 1 --workers")

    # The doctor goes in as a job, and tells of the node that there is.
    code, output = raydali("doctor", "--cluster", "--json", "-", "--storage", str(tmp_path / "runs"), env=using)
    diagnosis = json.loads(output[output.index("{") :])
    assert [node["storage"] for node in diagnosis["nodes"]] == [""]
    assert code == any(row["status"] == "fail" for row in diagnosis["rows"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_come_for_a_job_and_go_after_it(env: dict[str, str], shared: Cluster, tmp_path: Path) -> None:
    folder, using = shared
    assert nodes_of(env, folder) == 0
    storage = str(tmp_path / "runs")
    code, output = submit(using, "--workers", "3", "--epochs", "3", "--storage", storage, "--name", "grows")
    assert code == 0, output
    assert mentions(output, "3 gpu nodes 0 3 workers")
    assert mentions(output, "3 workers cpu first step")
    rows = RunFolder(storage, "grows").rows("epochs.jsonl")
    assert [row["world_size"] for row in rows] == [3, 3, 3]
    assert nodes_of(env, folder) == 3

    # More than it can add is not asked of it: it would add nothing.
    options = ["--workers", "1:9", "--epochs", "1", "--storage", storage, "--name", "limited"]
    code, output = submit(using, *options, "--global-batch-size", "288")
    assert code == 0, output
    assert mentions(output, "room 4 9 workers"), output
    wait_for(lambda: nodes_of(env, folder) == 0, seconds=IDLE_SECONDS + 90)


@pytest.mark.slow
def test_a_process_keeps_its_working_directory_when_another_node_starts(shared: Cluster, tmp_path: Path) -> None:
    """Else it could not import torch, for one: MKL ends a process that has no working directory."""
    folder, using = shared
    (tmp_path / "on_two_nodes.py").write_text(ON_TWO_NODES)
    command = [RAY, "job", "submit", "--working-dir", str(tmp_path), "--", "python", "on_two_nodes.py"]
    code, output = ended(command, using | {"PYTHONPATH": ""})
    assert code == 0, output
    assert mentions(output, folder), output
    session = Path(folder, "ray/session_latest")
    wait_for(lambda: not [*session.glob("runtime_resources_*")], seconds=IDLE_SECONDS + 90)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_busy_is_said_and_down_ends_what_runs_and_nothing_else(
    env: dict[str, str], shared: Cluster, tmp_path: Path
) -> None:
    folder, using = shared
    options = ["--epochs", "2000", "--storage", str(tmp_path / "runs")]
    code, output = submit(using, *options, "--workers", "4", "--name", "holds", wait=False)
    assert code == 0, output
    holds = RunFolder(str(tmp_path / "runs"), "holds")
    wait_for(lambda: bool(holds.rows("epochs.jsonl")), seconds=180)
    code, output = submit(using, *options, "--workers", "1", "--name", "waits", wait=False)
    assert code == 0, output
    job = next(word for word in output.split() if word.strip("'").startswith("raysubmit_")).strip("'")

    def log() -> str:
        return subprocess.run([RAY, "job", "logs", job], env=using, capture_output=True, text=True).stdout

    wait_for(lambda: mentions(log(), "hold 4 GPUs 0 workers"), seconds=90, why=log)

    # A process of another cluster, as far as its name and its mark tell.
    command = ["bash", "-c", "exec -a ray::IDLE sleep 600"]
    other = subprocess.Popen(command, env=env | {cluster_processes.MARK: f"{folder}-other"}, start_new_session=True)
    try:
        before = processes_of(folder)
        assert any("jobs/imagenet.py" in name_of(pid) for pid in before), "a job's driver is among them"
        code, output = raydali("cluster", "down", "--folder", folder, env=env)
        assert code == 0 and "ended" in output, output
        assert not [name for pid in [*before, *processes_of(folder)] if (name := name_of(pid))]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert not Path(folder).exists()
    assert raydali("cluster", "status", "--folder", folder, env=env)[0] == 1
    assert raydali("cluster", "down", "--folder", folder, env=env)[0] == 0
    assert [path.name for path in Path(env["HOME"]).iterdir()] == ["shared.yaml"], "the home folder is touched"
