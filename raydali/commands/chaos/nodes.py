"""A Ray cluster, a node a host: started, killed and started again by the ids of its processes."""

import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from raydali.commands.chaos.virtual_hosts import Host
from raydali.commands.local_cluster.head import HEAD_ENVIRONMENT, Ports
from raydali.errors import CommandFailed
from raydali.host.processes import MARK, command_line, kill, members

START_SECONDS = 120.0
END_SECONDS = 30.0
_OBJECT_STORE_BYTES = 100_000_000
_STARTED = "Ray runtime started"


class Nodes:
    """The cluster.

    Args:
        hosts: the first one's node is the head.
        ports: of Ray and its dashboard, free on the first host.
        folder: for what the nodes say.
        temp_dir: Ray's own; a short path.
    """

    def __init__(self, hosts: Sequence[Host], *, ports: Ports, folder: Path, temp_dir: Path) -> None:
        self.hosts = hosts
        self.address = f"{hosts[0].address}:{ports.ray}"
        self._ports, self._folder, self._temp_dir = ports, folder, temp_dir
        self._mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env: Mapping[str, str] = inherited | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            **HEAD_ENVIRONMENT,
        }
        """For whoever wants to use the cluster."""
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> None:
        """Start a node, and wait until it is part of the cluster.

        Raises:
            CommandFailed: it does not start; with the end of what it says.
        """
        host, log = self.hosts[number], self._folder / f"node{number}.log"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", "--num-gpus=0"]
        command += ["--disable-usage-stats", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        command += [f"--node-ip-address={host.address}", "--min-worker-port=0", "--max-worker-port=0"]
        if number:
            command += [f"--address={self.address}"]
        else:
            command += ["--head", f"--port={self._ports.ray}", f"--temp-dir={self._temp_dir}"]
            # Without one, Ray never gives back the places of a job whose driver was killed.
            command += ["--include-dashboard=true", f"--dashboard-host={host.address}"]
            command += [f"--dashboard-port={self._ports.dashboard}", f"--ray-client-server-port={self._ports.client}"]
        env = {**self.env, MARK: self._mark_of(number)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                host.command(command), env=env, stdout=output, stderr=output, start_new_session=True, cwd="/"
            )
        self._started.append(process)
        deadline = time.monotonic() + START_SECONDS
        while _STARTED not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise CommandFailed(f"node {number} does not start:\n{end}")
            time.sleep(0.1)

    def processes(self, number: int) -> list[psutil.Process]:
        """All that runs of a node."""
        return members(self._mark_of(number))

    def trainers(self, number: int) -> list[psutil.Process]:
        """The processes that train on a node."""
        return [process for process in self.processes(number) if "RayTrainWorker" in command_line(process)]

    def all_trainers(self) -> list[psutil.Process]:
        """Those of all nodes."""
        return [process for number in range(len(self.hosts)) for process in self.trainers(number)]

    def wait_until_gone(self, number: int, seconds: float) -> None:
        """Until a node has ended by itself, at most so long."""
        deadline = time.monotonic() + seconds
        while self.processes(number) and time.monotonic() < deadline:
            time.sleep(0.2)

    def kill(self, number: int) -> list[psutil.Process]:
        """SIGKILL to all of a node's processes; returns those that are left, which would be a bug."""
        return kill(self._mark_of(number), self.processes(number), END_SECONDS)

    def end(self) -> list[psutil.Process]:
        """Kill all nodes, the head last, and take Ray's files away; the processes that do not end."""
        left = [process for number in reversed(range(len(self.hosts))) for process in self.kill(number)]
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        return left

    def _mark_of(self, number: int) -> str:
        return f"{self._mark}-{number}"
