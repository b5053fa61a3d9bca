"""Machines that are taken away: a run leaves them behind a checkpoint, whether ranks or the driver are on them."""

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import DIGITS
from raydali.launch.driver.loop import DRAINING
from raydali.run.folder import RunFolder
from tests.support.cluster import RAY, ROOT, alive, committed, descendants, kill, nodes, start_job
from tests.support.messages import mentions
from tests.support.metadata_server import metadata_server
from tests.support.traces import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OPTIONS = ["--epochs", "40", "--global-batch-size", "64", "--name", "run", "--trace-samples"]
STREAM = replace(DIGITS, epochs=40, global_batch_size=64).stream(1437)


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


def test_a_cloud_notice_moves_the_run_to_another_machine(env: dict[str, str], tmp_path: Path) -> None:
    """Two nodes of one CPU each, both train."""
    with ExitStack() as stack:
        using, ids = stack.enter_context(nodes(env, tmp_path / "ray", ["1"], ["1"]))
        server = stack.enter_context(metadata_server())
        command = [sys.executable, "-m", "raydali.spot_notices", "aws", f"--metadata-url={server.url}"]
        command += [f"--address={using['RAY_ADDRESS']}", f"--node-id={ids[1]}"]
        with (tmp_path / "notices").open("wb") as output:
            started = subprocess.Popen(command, cwd=ROOT, env=using, stdout=output, stderr=output)
        notices = ended_with(stack, started)
        run = Run(stack, tmp_path, using, "--workers", "1:2")
        assert run.wait_for("start")["world_size"] == 2
        assert mentions(run.log, "--workers 1:2")
        server.announce(time.time() + 120)
        left, resumed = run.wait_for("left"), run.wait_for("resume")
        assert notices.wait(120) == 0 and "draining" in (tmp_path / "notices").read_text()
        assert left["notice"] == "preemption" and run.events("preemption") and not run.events("failure")
        assert resumed["step"] == left["step"] > 0 and resumed["world_size"] == 1, "nothing is done again"
        assert run.process.wait(300) == 0, run.log
        assert_whole(run.folder, STREAM)


def test_a_head_that_is_taken_away_interrupts_the_run(env: dict[str, str], tmp_path: Path) -> None:
    """The driver is on the head, which gives no CPU to workers; it drains, as it does at Kubernetes' SIGTERM."""
    with ExitStack() as stack:
        using, ids = stack.enter_context(nodes(env, tmp_path / "ray", ["1"]))
        (head,) = set(alive(using)) - set(ids)
        run = Run(stack, tmp_path, using, "--workers", "1")
        run.wait_for("start")
        drain = [RAY, "drain-node", f"--address={using['RAY_ADDRESS']}", f"--node-id={head}"]
        drain += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=SIGTERM"]
        subprocess.run([*drain, "--deadline-remaining-seconds=30"], env=using, check=True, timeout=120)
        assert run.process.wait(120) == 130, run.log
        (left,), (interrupt,) = run.events("left"), run.events("interrupt")
        assert interrupt["why"] == DRAINING and f"{DRAINING}: saving a checkpoint" in run.log
        assert left["notice"] == "stop" and left["step"] == committed(run.folder) > 0
