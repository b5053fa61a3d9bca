"""Machines that are taken away: a run leaves them behind a checkpoint, whether ranks or the driver are on them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from raydali.chaos.hosts import Host
from raydali.chaos.nodes import Nodes
from raydali.errors import CommandFailed
from raydali.launch.driver_node import DRAINING
from raydali.local_cluster.head import Ports, address_of_this_machine
from raydali.report.run_folder import RunFolder
from tests.cluster.metadata_server import metadata_server
from tests.cluster.support import ROOT, committed, descendants, environment, free_ports, kill, start_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OPTIONS = ["--epochs", "40", "--global-batch-size", "64", "--name", "run"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two hosts for nodes, both this machine; the test starts them."""
    ray, dashboard, client = free_ports(3)
    made = Nodes(
        [Host(f"node{number}", address_of_this_machine()) for number in range(2)],
        ports=Ports(ray=ray, dashboard=dashboard, client=client),
        folder=tmp_path,
        temp_dir=Path(f"/tmp/rdt-{ray}"),
    )
    yield made
    made.end()


@pytest.fixture
def env(nodes: Nodes, tmp_path: Path) -> dict[str, str]:
    """Of a user of that cluster."""
    (home := tmp_path / "home").mkdir()
    ray = {name: value for name, value in nodes.env.items() if name.startswith("RAY_")}
    return environment(home, **ray, RAY_ADDRESS=nodes.address)


def start(nodes: Nodes, number: int, cpus: int = 1) -> None:
    """Start a node: again, if this machine is too busy for the 30 s that Ray gives it."""
    for _ in range(2):
        with suppress(CommandFailed):
            nodes.start(number, cpus)
            return
        nodes.kill(number)
    nodes.start(number, cpus)


def ended_with(stack: ExitStack, process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    """The process, which is killed with all below it at the end."""

    def end() -> None:
        kill([*descendants(process.pid), process.pid])
        process.wait()

    stack.callback(end)
    return process


class Run:
    """The image job on that cluster, from its first step on."""

    def __init__(self, stack: ExitStack, tmp_path: Path, env: dict[str, str], *options: str) -> None:
        self.folder, self._log = RunFolder(str(tmp_path), "run"), tmp_path / "log"
        job = start_job(*OPTIONS, *options, "--storage", str(tmp_path), env=env, log=self._log)
        self.process = ended_with(stack, job)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.folder.rows("events.jsonl") if row["event"] == name]

    def wait_for(self, name: str) -> dict[str, Any]:
        """The first event of that name, once there is one."""
        deadline = time.monotonic() + 240
        while not (found := self.events(name)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.1)
        return found[0]


def test_a_notice_of_the_cloud_moves_the_run_to_the_other_machine(
    nodes: Nodes, env: dict[str, str], tmp_path: Path
) -> None:
    """Two nodes of one CPU each, both train."""
    for number in range(2):
        start(nodes, number)
    (raylet,) = [process.command for process in nodes.processes(1) if "--node_id=" in process.command]
    node_id = raylet.partition("--node_id=")[2].split()[0]
    with metadata_server() as server, ExitStack() as stack:
        command = [sys.executable, "-m", "raydali.spot_notices", "aws", f"--metadata-url={server.url}"]
        command += [f"--node-id={node_id}"]
        with (tmp_path / "notices").open("wb") as output:
            started = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        notices = ended_with(stack, started)
        run = Run(stack, tmp_path, env, "--workers", "1:2")
        assert run.wait_for("start")["world_size"] == 2
        assert "--workers 1:2 expects nodes to come and go" in run.log
        server.announce(time.time() + 120)
        left, resumed = run.wait_for("left"), run.wait_for("resume")
        assert notices.wait(60) == 0 and "draining" in (tmp_path / "notices").read_text()
        assert left["notice"] == "preemption" and run.events("preemption") and not run.events("failure")
        assert resumed["step"] == left["step"] > 0 and resumed["world_size"] == 1, "nothing is done again"
        assert run.process.wait(300) == 0, run.log


def test_a_head_that_is_evicted_interrupts_the_run(nodes: Nodes, env: dict[str, str], tmp_path: Path) -> None:
    """The driver is on the head, which gives no CPU to workers; it gets SIGTERM, as Kubernetes sends it."""
    start(nodes, 0, cpus=0)
    start(nodes, 1)
    with ExitStack() as stack:
        run = Run(stack, tmp_path, env, "--workers", "1")
        run.wait_for("start")
        (head,) = [process.pid for process in nodes.processes(0) if " start --block " in process.command]
        os.kill(head, signal.SIGTERM)
        assert run.process.wait(60) == 130, run.log
        (left,), (interrupt,) = run.events("left"), run.events("interrupt")
        assert interrupt["why"] == DRAINING and f"{DRAINING}: saving a checkpoint" in run.log
        assert left["notice"] == "stop" and left["step"] == committed(run.folder) > 0
