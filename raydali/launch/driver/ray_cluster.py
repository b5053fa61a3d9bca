"""Connect to the Ray that a job runs on: the one that RAY_ADDRESS names, or one of our own on this machine."""

import hashlib
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from raydali.errors import StartError, SupersededError, UsageError
from raydali.host.cpu_times import usable_cores
from raydali.host.interrupts import raise_on_signals
from raydali.launch import process_server
from raydali.launch.driver.autoscaler import UNKNOWN, growth_of, present_groups, read_config
from raydali.launch.driver.placement import DEFAULT_CPU_WORKERS, Cluster
from raydali.launch.driver.ray_start import own_ray, set_environment, tidy
from raydali.launch.options import LaunchOptions
from raydali.text import error_line, plural

WORKERS_PER_CORE = 8
"""CPU workers per core that a Ray of our own accepts, for trying larger world sizes."""
ANSWER_SECONDS = 5.0
"""Time limit of a TCP connection to the address of a Ray that runs; Ray would wait minutes for an answer."""
COMPATIBLE = {"env_vars", "working_dir", "py_modules", "excludes", "config"}
"""Parts of a job's runtime environment that leave the choice of Python to Ray."""
PYTHON_OF_RAYLET = r"tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'"


def check_own_ray(options: LaunchOptions) -> None:
    """Refuse more workers than a Ray of our own accepts, before anything is started or written.

    Raises:
        UsageError: names both figures.
    """
    if not os.environ.get("RAY_ADDRESS"):
        _own_cpus(options)


@contextmanager
def connect(options: LaunchOptions, warn: Callable[[str], None]) -> Iterator[Cluster]:
    """Join the cluster that RAY_ADDRESS names, or start a Ray of our own and end it again.

    From then on SIGINT, even if a shell's background job ignores it, and SIGTERM, which `ray job stop` sends, raise
    KeyboardInterrupt.

    Our own requires a random token of its clients, keeps its files in a short folder that is removed with it, and does
    not touch the home folder. Folders of earlier ones that failed are removed after a week.

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
    if os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # for its dashboard, which a Ray of our own lacks
        with _joined() as cluster:
            yield cluster
        return
    cpus = _own_cpus(options)
    if "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    set_environment()
    tidy()
    folder = tempfile.mkdtemp(prefix="raydali-", dir="/tmp")
    keep_logs = False
    try:
        with own_ray(folder, cpus, warn) as check:
            raise_on_signals()  # now, since Ray's start takes SIGTERM to print its stack
            yield Cluster(_nodes(), own=True, check=check)
    except (UsageError, SupersededError, KeyboardInterrupt):
        raise
    except Exception as error:
        if not isinstance(error, StartError):
            error.add_note(f"the logs of all processes are in {folder}/session_latest/logs")
        keep_logs = True
        raise
    finally:
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def answering_ray() -> Iterator[None]:
    """Connect to the Ray that RAY_ADDRESS names in this context, once something listens there.

    Raises:
        UsageError: nothing does, or the connection fails.
    """
    from ray._private.services import canonicalize_bootstrap_address

    address = os.environ["RAY_ADDRESS"]
    try:
        found = address if "://" in address else f"ray://{canonicalize_bootstrap_address(address)}"
        place = urlsplit(found)
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), ANSWER_SECONDS).close()
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray answers at RAY_ADDRESS={address} ({error_line(error)}): unset it, start Ray there, or check "
            "RAY_AUTH_MODE and the token"
        ) from error


def _own_cpus(options: LaunchOptions) -> int:
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
def _joined() -> Iterator[Cluster]:
    import ray

    with answering_ray():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=_environment_of_job())
    raise_on_signals()  # now, since Ray's start takes SIGTERM to print its stack
    try:
        yield _cluster()
    finally:
        ray.shutdown()


def _environment_of_job() -> dict[str, str]:
    """Return a runtime environment in which the processes of this job are forks of a server on each node.

    Jobs with other environment variables do not share a server, since modules read some. A node that lacks its file, or
    a job that has a Python of its own, starts its processes as without servers.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    if sys.platform != "linux" or any(name not in COMPATIBLE and not name.startswith("_") for name in job):
        return {}
    file = shlex.quote(process_server.__file__)
    shared = hashlib.sha256(json.dumps(job.get("env_vars"), sort_keys=True).encode()).hexdigest()[:8]
    python = f"p=$({PYTHON_OF_RAYLET}); p=${{p:-{shlex.quote(sys.executable)}}}"
    return {"py_executable": f"$({python}; [ -f {file} ] && echo $p {file} {shared} || echo $p)"}


def _cluster() -> Cluster:
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    try:
        config = read_config()
    except LookupError:
        return Cluster(_nodes(), own=False, growth=UNKNOWN)
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    present = present_groups([*status.active_nodes, *status.idle_nodes])
    return Cluster(_nodes(), own=False, growth=growth_of(config, present), autoscaler=config)


def _nodes() -> tuple[tuple[float, float], ...]:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return tuple((each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in resources)
