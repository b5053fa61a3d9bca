"""Start a Ray of our own: with longer timeouts for busy machines, few processes, and a one-line error.

Ray 2.60 gives its server 30 s to start and its raylet 30 s. The raylet gives its agents, Python processes, 15 s each to
report their ports, then exits. A busy machine needs longer for each.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL

from raydali.errors import StartError
from raydali.host.cpu_times import usable_cores
from raydali.launch import process_server
from raydali.launch.process_server import OWN_SERVER
from raydali.text import plural

START_SECONDS = 600
"""How long Ray may take to start."""
WARN_SECONDS = 20.0
"""Interval between two warnings that it is still starting."""
KEPT_DAYS = 7
"""How long the logs of a Ray that failed are kept."""


def set_environment() -> None:
    """Set Ray's timeouts, and start no workers in advance, which would import again; call it before Ray is imported.

    RAY_raylet_start_wait_time_s keeps its 30 s: it is the timeout of one request, which is repeated.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_SECONDS))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * START_SECONDS))
    os.environ.setdefault("RAY_worker_register_timeout_seconds", str(START_SECONDS))
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


@contextmanager
def own_ray(folder: str, cpus: int, warn: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Start a Ray of our own, connect to it, and end it.

    Args:
        folder: for its files; its path must be short.
        cpus: CPUs that its node declares.
        warn: takes a warning that the start takes long.

    Yields:
        A function that raises a ChildProcessError if one of its processes has ended.

    Raises:
        StartError: it did not start; the message names its logs.
    """
    with _process_server(folder), ExitStack() as stack:
        try:
            with _warnings_if_slow(warn):
                import ray

                from raydali.launch.driver.own_node import OwnNode

                node = OwnNode(folder, cpus, time.monotonic() + START_SECONDS)
                stack.callback(node.end)
                stack.callback(ray.shutdown)
                ray.init(node.gcs_address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            logs = f"its logs are in {folder}/session_latest/logs"
            raise StartError(f"Ray did not start: {why}; {load()}; {logs}") from error
        yield node.check


@contextmanager
def _process_server(folder: str) -> Iterator[None]:
    """Start the server of its processes before it, and end it."""
    os.environ[OWN_SERVER] = f"{folder}/processes"
    command = [sys.executable, process_server.__file__, os.environ[OWN_SERVER]]
    server = subprocess.Popen(command, start_new_session=True, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


@contextmanager
def _warnings_if_slow(warn: Callable[[str], None]) -> Iterator[None]:
    began = time.monotonic()
    over = threading.Event()

    def run() -> None:
        while not over.wait(WARN_SECONDS):
            passed = time.monotonic() - began
            warn(f"Ray has not started after {passed:.0f} s, and may need up to {START_SECONDS} s: {load()}")

    threading.Thread(target=run, daemon=True, name="slow start").start()
    try:
        yield
    finally:
        over.set()


def load() -> str:
    """Describe how busy the machine is."""
    busy, cores = os.getloadavg()[0], usable_cores()
    return f"{'the machine is busy, ' if busy > cores else ''}load average {busy:.1f} on {plural(cores, 'core')}"


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
