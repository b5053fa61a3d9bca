"""The node of a Ray of our own: with few processes, which may start slowly on a busy machine."""

import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import persist_port  # type: ignore[attr-defined]

from raydali.launch import process_server

_PORTS = "gcs_server_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port"
_AGENT_PORT = "dashboard_agent_listen_port"
REGISTER_SECONDS = 0.1
"""Time for a raylet that listens to be registered, because a question before that takes a second."""


class OwnNode(Node):
    """The head of a Ray of one node.

    Ray gives its raylet 30 s to start, and the raylet gives its agents, Python processes, 15 s each to report their
    ports, then exits. A busy machine needs longer. So the raylet is given the ports of its agents.

    Args:
        folder: for its files.
        cpus: CPUs that it declares.
        deadline: until when it must have started, as a time of the monotonic clock.

    Raises:
        ChildProcessError: one of its processes has ended.
        TimeoutError: it has not started in time.
    """

    def __init__(self, folder: str, cpus: int, deadline: float) -> None:
        self._deadline = deadline
        *ports, self._agent_port = free_ports(len(_PORTS) + 1)
        given: dict[str, Any] = dict(zip(_PORTS, ports, strict=True))
        params = RayParams(
            num_cpus=cpus,
            temp_dir=folder,
            include_dashboard=False,
            no_monitor=True,  # there is nothing to scale
            include_log_monitor=False,  # type: ignore[arg-type]  # of Ray
            setup_worker_path=process_server.__file__,
            dashboard_agent_listen_port=self._agent_port,
            **given,
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
        while not _listens(host.strip("[]"), int(port)):
            self._wait("gcs_server")

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet; it has no option for the port of this agent alone."""
        folder = self.get_session_dir_path()  # type: ignore[no-untyped-call]
        persist_port(folder, self.node_id, _AGENT_PORT, self._agent_port)
        super().start_raylet(*arguments, **options)

    def start_ray_processes(self) -> None:
        """Start the raylet, and wait until Ray's server knows it, for longer than Ray."""
        super().start_ray_processes()  # type: ignore[no-untyped-call]
        while not Path(self.raylet_socket_name).exists():
            self._wait("raylet")
        time.sleep(REGISTER_SECONDS)
        while True:
            try:
                services.get_node(self.gcs_address, self.node_id)
                return
            except RuntimeError:
                self._wait("raylet")

    def _wait(self, name: str) -> None:
        try:
            self.check()
        except ChildProcessError as error:
            raise ChildProcessError(f"its {name} has ended") from error
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"its {name} did not start in time")
        time.sleep(0.01)


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens on, below those that the kernel assigns."""
    with ExitStack() as stack:
        found = set[int]()
        for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
            with suppress(OSError):
                stack.enter_context(socket.create_server(("0.0.0.0", port)))
                found.add(port)
            if len(found) == number:
                return [*found]
    raise OSError("no ports from 20000 to 32767 are free")
