"""The node of a Ray of our own: with few processes, which may start slowly on a busy machine."""

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import persist_port  # type: ignore[attr-defined]

from raydali.launch import fork_server

_PORTS = "gcs_server_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port"
_AGENT_PORT = "dashboard_agent_listen_port"
WARN_SECONDS = 20.0
"""Interval between two warnings that Ray is still starting."""


class OwnNode(Node):
    """The head of a Ray of one node. Its raylet is given the ports of its agents, so that it does not wait for them.

    Args:
        folder: for its files.
        cpus: CPUs that it declares.
        seconds: within which each of its processes must have started.
        warn: takes a warning that the start takes long.

    Raises:
        ChildProcessError: one of its processes has ended.
        TimeoutError: it has not started in time.
    """

    def __init__(self, folder: str, cpus: int, seconds: float, warn: Callable[[str], None]) -> None:
        self._seconds, self._warn = seconds, warn
        *ports, self._agent_port = free_ports(len(_PORTS) + 1)
        port_options: dict[str, Any] = dict(zip(_PORTS, ports, strict=True))
        params = RayParams(
            num_cpus=cpus,
            temp_dir=folder,
            include_dashboard=False,
            no_monitor=True,  # there is nothing to scale
            include_log_monitor=False,  # type: ignore[arg-type]  # of Ray
            setup_worker_path=fork_server.__file__,
            dashboard_agent_listen_port=self._agent_port,
            **port_options,
        )
        super().__init__(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)

    def check(self) -> None:
        """Raise a ChildProcessError if a process has ended."""
        for name, process in self.dead_processes():  # type: ignore[no-untyped-call]
            raise ChildProcessError(f"Ray's {name} ended with exit code {process.returncode}")

    def end(self) -> None:
        """End all processes."""
        self.kill_all_processes(check_alive=False, allow_graceful=True)

    def start_api_server(self, **_: object) -> None:
        """Do nothing: without a dashboard, it would only report usage statistics."""

    def start_gcs_server(self) -> None:
        """Start Ray's server, and wait until it listens; Ray would try again after a second."""
        super().start_gcs_server()  # type: ignore[no-untyped-call]
        host, _, port = self.gcs_address.rpartition(":")
        self._wait("gcs_server", lambda: _listens(host.strip("[]"), int(port)))

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet, and wait until it listens: Ray would wait for 30 s only.

        It has no option for the port of this agent alone.
        """
        folder = self.get_session_dir_path()  # type: ignore[no-untyped-call]
        persist_port(folder, self.node_id, _AGENT_PORT, self._agent_port)
        super().start_raylet(*arguments, **options)
        self._wait("raylet", Path(self.raylet_socket_name).exists)

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        began = warned = time.monotonic()
        while not is_ready():
            self.check()
            now = time.monotonic()
            if now - began > self._seconds:
                raise TimeoutError(f"its {name} did not start in time")
            if now - warned > WARN_SECONDS:
                warned = now
                self._warn(f"Ray has not started after {now - began:.0f} s, and may need up to {self._seconds:.0f} s")
            time.sleep(0.01)


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens on, below those that the kernel assigns."""
    with ExitStack() as stack:
        free = set[int]()
        for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
            with suppress(OSError):
                stack.enter_context(socket.create_server(("0.0.0.0", port)))
                free.add(port)
            if len(free) == number:
                return [*free]
    raise OSError("no ports from 20000 to 32767 are free")
