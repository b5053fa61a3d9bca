"""Connect to the Ray that a job runs on: the one that RAY_ADDRESS names, or one of our own on this machine."""

import hashlib
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from raydali.errors import UsageError
from raydali.host.interrupts import raise_on_signals
from raydali.launch import fork_server
from raydali.launch.driver.autoscaler import read_growth
from raydali.launch.driver.cluster import NO_GROWTH, Cluster, connected_cluster
from raydali.launch.driver.own_ray import cpus_for, own_ray
from raydali.options.placement import PlacementOptions
from raydali.text import error_line

ANSWER_SECONDS = 5.0
"""Time limit of a TCP connection to the address of a Ray that runs; Ray would wait minutes for an answer."""
COMPATIBLE = {"env_vars", "working_dir", "py_modules", "excludes", "config"}
"""Parts of a job's runtime environment that leave the choice of Python to Ray."""
PYTHON_OF_RAYLET = r"tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'"


@dataclass(frozen=True)
class ConnectedRay:
    """The Ray that this process is connected to.

    Attributes:
        look: returns the present state of the cluster.
        own: whether we started it.
        check: raises a ChildProcessError if a process of a Ray of our own has ended.
    """

    look: Callable[[], Cluster]
    own: bool = False
    check: Callable[[], None] = lambda: None

    def is_leaving(self) -> bool:
        """Return whether this node is about to be taken away: Ray Train only reacts to nodes that have ranks.

        When Kubernetes evicts a head without ranks, all steps since the newest checkpoint would be lost.
        """
        import ray

        with suppress(Exception):  # Ray does not answer
            return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()
        return False


@contextmanager
def connect(options: PlacementOptions, warn: Callable[[str], None]) -> Iterator[ConnectedRay]:
    """Join the cluster that RAY_ADDRESS names, or start a Ray of our own and end it again.

    From then on SIGINT, even if a shell's background job ignores it, SIGTERM, which `ray job stop` sends, and SIGHUP,
    unless `nohup` ignores it, raise KeyboardInterrupt.

    Args:
        options: give the number of workers.
        warn: takes a warning that a Ray of our own starts slowly.

    Raises:
        StartError: a Ray of our own did not start.
        UsageError: more CPU workers than a Ray of our own accepts, or no answer at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # see compile_cache.enter_working_folder
    if not os.environ.get("RAY_ADDRESS"):
        with own_ray(cpus_for(options), warn) as check:
            raise_on_signals()  # now, since Ray's start takes SIGTERM to print its stack
            yield ConnectedRay(partial(connected_cluster, lambda _: NO_GROWTH), own=True, check=check)
        return
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # for its dashboard, which a Ray of our own lacks
    import ray

    with answering_ray():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=_environment_of_job())
    raise_on_signals()
    try:
        yield ConnectedRay(partial(connected_cluster, read_growth()))
    finally:
        ray.shutdown()


@contextmanager
def answering_ray() -> Iterator[None]:
    """Connect to the Ray that RAY_ADDRESS names in this context, once something listens there.

    Raises:
        UsageError: nothing does, or the connection fails.
    """
    from ray._private.services import canonicalize_bootstrap_address

    address = os.environ["RAY_ADDRESS"]
    try:
        uri = address if "://" in address else f"ray://{canonicalize_bootstrap_address(address)}"
        place = urlsplit(uri)
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), ANSWER_SECONDS).close()
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray answers at RAY_ADDRESS={address} ({error_line(error)}): unset it, start Ray there, or check "
            "RAY_AUTH_MODE and the token"
        ) from error


def _environment_of_job() -> dict[str, str]:
    """Return a runtime environment in which the processes of this job are forks of a server on each node.

    Jobs with other environment variables do not share a server, since modules read some. A node that lacks its file, or
    a job that has a Python of its own, starts its processes as without servers.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    if sys.platform != "linux" or any(name not in COMPATIBLE and not name.startswith("_") for name in job):
        return {}
    file = shlex.quote(fork_server.__file__)
    shared = hashlib.sha256(json.dumps(job.get("env_vars"), sort_keys=True).encode()).hexdigest()[:8]
    python = f"p=$({PYTHON_OF_RAYLET}); p=${{p:-{shlex.quote(sys.executable)}}}"
    return {"py_executable": f"$({python}; [ -f {file} ] && echo $p {file} {shared} || echo $p)"}
