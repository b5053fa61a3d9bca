"""A Ray cluster with one node per host; single nodes can be started and killed."""

import os
import secrets
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from raydali.commands.cluster import HEAD_ENVIRONMENT
from raydali.errors import CommandError
from raydali.host.cluster_processes import MARK, kill, members
from raydali.output import log_tail
from tests.support.chaos.virtual_hosts import Host
from tests.support.cluster import RAY, command_line, free_ports

START_SECONDS = 120.0
END_SECONDS = 30.0
_OBJECT_STORE_BYTES = 100_000_000
_STARTED = "Ray runtime started"


class Nodes:
    """The cluster of an experiment.

    Args:
        hosts: the hosts; the node on the first one is the head.
        folder: folder for the logs of the nodes.
        temp_dir: Ray's temporary folder; a short path.
        cpus: number of workers that fit on a node.
        gpus: number of GPUs of this machine, which the nodes share, one for each worker; 0: workers have none.
        settings: further environment variables of all processes that use the cluster.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        folder: Path,
        temp_dir: Path,
        cpus: int = 1,
        gpus: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self._port, self._dashboard_port, self._client_port = free_ports(3)
        self.address = f"{hosts[0].address}:{self._port}"
        self._folder, self._temp_dir, self._cpus, self._gpus = folder, temp_dir, cpus, gpus
        self._mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env: Mapping[str, str] = inherited | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            **HEAD_ENVIRONMENT,
            **(settings or {}),
        }
        """Environment of processes that use the cluster."""
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> None:
        """Start a node, and wait until it is part of the cluster.

        Raises:
            CommandError: the node does not start; the message has the end of its log.
        """
        host, log = self.hosts[number], self._folder / f"node{number}.log"
        if number:
            options = [f"--address={self.address}"]
        else:
            # Without a dashboard, Ray never frees the resources of a job after its driver was killed.
            options = ["--head", f"--port={self._port}", f"--ray-client-server-port={self._client_port}"]
            options += [f"--temp-dir={self._temp_dir}", "--include-dashboard=true"]
            options += [f"--dashboard-host={host.address}", f"--dashboard-port={self._dashboard_port}"]
        gpus = self._cpus if self._gpus else 0
        options += [f"--num-cpus={self._cpus}", f"--num-gpus={gpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        options += [f"--node-ip-address={host.address}", "--min-worker-port=0", "--max-worker-port=0"]
        env = {**self.env, **self._gpu_settings(number), MARK: self._mark_of(number)}
        command = host.command([RAY, "start", "--block", "--disable-usage-stats", *options])
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True, cwd="/")
        self._started.append(process)
        deadline = time.monotonic() + START_SECONDS
        while _STARTED not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandError(f"node {number} does not start:\n{log_tail(log)}")
            time.sleep(0.1)

    def _gpu_settings(self, number: int) -> dict[str, str]:
        """Return which GPUs the node has. NCCL takes it for a host: otherwise it refuses ranks that share a GPU."""
        if not self._gpus:
            return {}
        own = [(number * self._cpus + index) % self._gpus for index in range(self._cpus)]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)),
            "NCCL_HOSTID": self.hosts[number].name,
            "NCCL_SOCKET_IFNAME": self.hosts[number].interface,
        }

    def processes(self, number: int) -> list[psutil.Process]:
        """Return the processes of a node."""
        return members(self._mark_of(number))

    def trainers(self, number: int) -> list[psutil.Process]:
        """Return the ranks on a node."""
        return [process for process in self.processes(number) if "RayTrainWorker" in command_line(process)]

    def all_trainers(self) -> list[psutil.Process]:
        """Return the ranks on all nodes."""
        return [process for number in range(len(self.hosts)) for process in self.trainers(number)]

    def kill(self, number: int) -> list[psutil.Process]:
        """Kill all processes of a node; return those that do not end."""
        return kill(self._mark_of(number), self.processes(number), END_SECONDS)

    def end(self) -> list[psutil.Process]:
        """Kill all nodes, the head last, and delete Ray's files; return the processes that do not end."""
        left = [process for number in reversed(range(len(self.hosts))) for process in self.kill(number)]
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        return left

    def _mark_of(self, number: int) -> str:
        return f"{self._mark}-{number}"
