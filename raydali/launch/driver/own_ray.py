"""Start a Ray of our own on this machine: with longer timeouts for busy machines, few processes, and a one-line error.

Ray 2.60 gives its server 30 s to start and its raylet 30 s. The raylet gives its agents, Python processes, 15 s each to
report their ports, then exits. A busy machine needs longer for each.
"""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from subprocess import DEVNULL

from raydali.errors import StartError, SupersededError, UsageError
from raydali.host.cpu_times import load, usable_cores
from raydali.launch import fork_server
from raydali.launch.driver.placement import DEFAULT_CPU_WORKERS
from raydali.launch.fork_server import OWN_SERVER
from raydali.options.placement import PlacementOptions
from raydali.text import plural

WORKERS_PER_CORE = 8
"""CPU workers per core that a Ray of our own accepts, for trying larger world sizes."""
START_SECONDS = 600
"""How long Ray may take to start."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": str(1000 * START_SECONDS),
    "RAY_worker_register_timeout_seconds": str(START_SECONDS),
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
"""Ray's timeouts; no workers in advance, which would import again; and workers with the priority of other processes,
since Ray's default of 15 lets them wait for minutes on a busy machine."""


def cpus_for(options: PlacementOptions) -> int:
    """Return the CPUs that a Ray of our own declares.

    Raises:
        UsageError: more CPU workers than it accepts; names both figures.
    """
    cores = usable_cores()
    workers = options.worker_range[1] if options.worker_range else DEFAULT_CPU_WORKERS
    cpus = options.cpus_per_worker or 1
    if workers * cpus > WORKERS_PER_CORE * cores:
        raise UsageError(
            f"{plural(workers, 'worker')} of {plural(cpus, 'CPU')} each need more than this machine's limit of "
            f"{WORKERS_PER_CORE * cores} CPUs, for {plural(cores, 'core')}: lower --workers or --cpus-per-worker"
        )
    return max(cores, workers * cpus)


@contextmanager
def own_ray(cpus: int, warn: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Start a Ray of our own, connect to it, and end it.

    It requires a random token of its clients, keeps its files in a short folder that is removed with it, and does not
    touch the home folder. If it, or what it is used for, fails, the folder stays, for its logs.

    Args:
        cpus: CPUs that its node declares.
        warn: takes a warning that the start takes long.

    Yields:
        A function that raises a ChildProcessError if one of its processes has ended.

    Raises:
        StartError: it did not start; the message names its logs.
    """
    if "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    folder = tempfile.mkdtemp(prefix="raydali-", dir="/tmp")
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            with _started(folder, cpus, warn) as check:
                yield check
        except Exception as error:
            if not isinstance(error, UsageError | SupersededError):
                at_end.pop_all()  # the logs are kept
                if not isinstance(error, StartError):
                    error.add_note(f"the logs of all processes are in {folder}/session_latest/logs")
            raise


@contextmanager
def _started(folder: str, cpus: int, warn: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Start the server of its processes and then Ray with files in this folder, and end both."""
    os.environ[OWN_SERVER] = f"{folder}/processes"
    command = [sys.executable, fork_server.__file__, os.environ[OWN_SERVER]]
    with ExitStack() as stack:
        server = subprocess.Popen(command, start_new_session=True, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        try:
            import ray

            from raydali.launch.driver.own_node import OwnNode

            # A terminal that closes signals all processes that were started there: Ray's must not end before the run.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            try:
                node = OwnNode(folder, cpus, START_SECONDS, lambda text: warn(f"{text}: {load()}"))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            stack.callback(node.end)
            stack.callback(ray.shutdown)
            ray.init(node.gcs_address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            logs = f"its logs are in {folder}/session_latest/logs"
            raise StartError(f"Ray did not start: {why}; {load()}; {logs}") from error
        yield node.check
