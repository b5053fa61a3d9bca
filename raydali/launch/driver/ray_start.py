"""Start a Ray of our own: with longer timeouts for busy machines, few processes, and a one-line error.

Ray 2.60 gives its server 30 s to start and its raylet 30 s. The raylet gives its agents, Python processes, 15 s each to
report their ports, then exits. A busy machine needs longer for each.
"""

import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from raydali.errors import StartError
from raydali.host.cpu_times import usable_cores
from raydali.launch.driver.process_servers import SETUP_WORKER
from raydali.text import plural

START_SECONDS = 600
"""How long Ray may take to start."""
WARN_SECONDS = 20.0
"""Interval between two warnings that it is still starting."""
KEPT_DAYS = 7
"""How long the logs of a Ray that failed are kept."""
T = TypeVar("T")
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def set_environment() -> None:
    """Set Ray's timeouts, and start no workers in advance, which would import again; call it before Ray is imported.

    RAY_raylet_start_wait_time_s keeps its 30 s: it is the timeout of one request, which is repeated.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_SECONDS))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * START_SECONDS))
    os.environ.setdefault("RAY_worker_register_timeout_seconds", str(START_SECONDS))
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


def start_ray(folder: str, warn: Callable[[str], None], **options: Any) -> None:
    """Start a Ray of our own and connect to it.

    Args:
        folder: for its files; its path must be short.
        warn: takes a warning that the start takes long.
        options: of `ray.init`.

    Raises:
        StartError: it did not start; the message names its logs.
    """
    began = time.monotonic()
    over = threading.Event()

    def warn_if_slow() -> None:
        while not over.wait(WARN_SECONDS):
            passed = time.monotonic() - began
            warn(f"Ray has not started after {passed:.0f} s, and may need up to {START_SECONDS} s: {load()}")

    threading.Thread(target=warn_if_slow, daemon=True, name="slow start").start()
    try:
        import ray

        ports = dict(zip(_AGENT_PORTS, free_ports(len(_AGENT_PORTS)), strict=True))
        with _slow_start(began + START_SECONDS, ports):
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=folder,
                _metrics_export_port=ports["metrics_export_port"],
                **options,
            )
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartError(f"Ray did not start: {why}; {load()}; its logs are in {folder}/session_latest/logs") from error
    finally:
        over.set()


def check_processes() -> None:
    """Raise a ChildProcessError if a process of a Ray of our own has ended."""
    import ray

    node: Any = ray._private.worker._global_node
    for name, process in node.dead_processes():
        raise ChildProcessError(f"Ray's {name} ended with exit code {process.returncode}")


def load() -> str:
    """Describe how busy the machine is."""
    busy, cores = os.getloadavg()[0], usable_cores()
    return f"{'the machine is busy, ' if busy > cores else ''}load average {busy:.1f} on {plural(cores, 'core')}"


@contextmanager
def _slow_start(deadline: float, ports: dict[str, int]) -> Iterator[None]:
    """Within this, the start of a Ray node is retried until the deadline, unless one of its servers exits.

    The raylet is given the ports of its agents, so that it does not wait for them, and a program of ours that starts
    its processes. There is nothing for the monitor to
    scale, and without a dashboard, the API server would only report usage statistics.
    """
    from ray._private import node, parameter, services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    def waiting(call: Callable[..., T], what: str) -> Callable[..., T]:
        def wait(*args: Any, **options: Any) -> T:
            while True:
                try:
                    return call(*args, **options)
                except RuntimeError as error:
                    if _has_ended(what):
                        raise ChildProcessError(f"its {what} has ended") from error
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"its {what} did not start within {START_SECONDS} s") from error

        return wait

    wait_for_port = waiting(node.wait_for_persisted_port, "gcs_server")  # type: ignore[attr-defined]

    def wait_for_server(folder: str, node_id: str, name: str, timeout_ms: int) -> int:
        # A raylet has no option for only this port.
        persist_port(folder, node_id, "dashboard_agent_listen_port", ports["dashboard_agent_listen_port"])
        return int(wait_for_port(folder, node_id, name, timeout_ms=min(timeout_ms, 2000)))

    given: dict[str, Any] = {name: port for name, port in ports.items() if name != "metrics_export_port"}  # ray.init's
    given |= {"no_monitor": True, "include_log_monitor": False, "setup_worker_path": SETUP_WORKER}
    replaced = (
        (node, "wait_for_persisted_port", wait_for_server),
        (services, "get_node", waiting(services.get_node, "raylet")),
        (services, "start_api_server", lambda *_, **__: (None, None)),
        (parameter, "RayParams", partial(parameter.RayParams, **given)),
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, ours in replaced:
            setattr(module, name, ours)
        yield
    finally:
        for (module, name, _), theirs in zip(replaced, before, strict=True):
            setattr(module, name, theirs)


def _has_ended(name: str) -> bool:
    """Return whether a child of this process with that name is a zombie: Ray does not reap children while it starts."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process().children()
        return any(child.status() == psutil.STATUS_ZOMBIE and child.name() == name for child in children)
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


def tidy(root: str = "/tmp") -> None:
    """Remove the folders of earlier Rays of ours, owned by this user, that were not written to for a week."""
    for folder in Path(root).iterdir():
        if re.fullmatch(r"raydali-(?!\d+$)[a-z0-9_]{8}", folder.name):  # digits only: of `raydali cluster`
            with suppress(OSError):
                about = folder.lstat()
                days = (time.time() - _last_written(folder)) / 86_400
                if folder.is_dir() and not folder.is_symlink() and about.st_uid == os.getuid() and days > KEPT_DAYS:
                    shutil.rmtree(folder, ignore_errors=True)


def _last_written(folder: Path) -> float:
    """Return the time of the last write, in seconds since 1970; a running Ray writes several times a minute."""
    paths = [folder, *(Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files))]
    return max(path.lstat().st_mtime for path in paths)
