"""The Ray that a job runs on: the one that RAY_ADDRESS names, or one of its own on this machine."""

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor

from raydali.errors import UsageError
from raydali.launch.options import LaunchOptions

WORKERS_PER_CORE = 8
"""How far CPU workers may outnumber the cores of a Ray of our own: for trying world sizes, not for speed."""
DEFAULT_CPU_WORKERS = 2


@dataclass(frozen=True)
class Placement:
    """How many workers, and what each one reserves; `minimum` < `maximum` is elastic."""

    minimum: int
    maximum: int
    cpus: int
    gpu: bool


@dataclass(frozen=True)
class Cluster:
    """What a Ray has: CPUs and GPUs of each node."""

    nodes: tuple[tuple[float, float], ...]
    own: bool

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return int(sum(gpus for _, gpus in self.nodes))

    def fitting(self, cpus: int, gpu: bool) -> int:
        """How many workers that reserve `cpus` CPUs, and with `gpu` one GPU, the nodes hold when idle."""
        return sum(floor(min(c / cpus, g) if gpu else c / cpus) for c, g in self.nodes)

    def __str__(self) -> str:
        cpus = sum(cpus for cpus, _ in self.nodes)
        return f"{_counted(len(self.nodes), 'node')}, {cpus:g} CPUs, {self.gpus} GPUs"


def place(options: LaunchOptions, cluster: Cluster) -> Placement:
    """The placement that the options ask of this cluster, defaults filled in.

    Workers default to one a GPU, or 2 on CPUs; CPUs a worker to the cores a GPU has, or an equal share.

    Raises:
        UsageError: what is asked cannot be met, with both figures.
    """
    gpu = options.gpu or (cluster.gpus > 0 and not options.no_gpu)
    minimum, maximum = options.worker_range or ((cluster.gpus,) * 2 if gpu else (DEFAULT_CPU_WORKERS,) * 2)
    if gpu and not cluster.gpus:
        raise UsageError(f"--gpu asks for GPUs, but the cluster has none ({cluster}): use --no-gpu")
    if options.cpus_per_worker is not None:
        cpus = options.cpus_per_worker
    elif gpu:
        cpus = max(1, min(floor(c / g) for c, g in cluster.nodes if g))
    else:
        shares = range(max(1, int(max(c for c, _ in cluster.nodes))), 0, -1)
        cpus = next((share for share in shares if cluster.fitting(share, gpu) >= maximum), 1)
    if cluster.fitting(cpus, gpu) < minimum:
        each = _counted(cpus, "CPU") + (" and 1 GPU" if gpu else "")
        raise UsageError(
            f"{minimum} workers of {each} each were asked for, but the cluster ({cluster}) holds "
            f"{cluster.fitting(cpus, gpu)}: lower --workers or --cpus-per-worker"
        )
    return Placement(minimum, maximum, cpus, gpu)


def check_own_ray(options: LaunchOptions) -> None:
    """Refuse what a Ray of our own cannot be given, before anything is started or written.

    Raises:
        UsageError: more workers than this machine takes, with both figures.
    """
    if not os.environ.get("RAY_ADDRESS"):
        _own_cpus(options)


def _heed_interrupts() -> None:
    """After Ray's start, which takes SIGTERM to print its stack; a shell's background job ignores SIGINT."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


@contextmanager
def connect(options: LaunchOptions) -> Iterator[Cluster]:
    """Join the cluster that RAY_ADDRESS names, or start a Ray of our own and end it again.

    From then on SIGINT and SIGTERM, which `ray job stop` sends, are interruptions.

    Our own listens for holders of a random token only, keeps its files in a short folder that goes with it, and
    leaves the home folder untouched.

    Raises:
        UsageError: more CPU workers than a Ray of our own may be given, or nobody answers at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("RAY_ADDRESS"):
        with _joined() as cluster:
            yield cluster
        return
    cpus = _own_cpus(options)
    if "ray" not in sys.modules:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.mkdtemp(prefix="raydali-", dir="/tmp")
    keep_logs = False
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        _heed_interrupts()
        yield Cluster(_nodes(), own=True)
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:
        error.add_note(f"the logs of all processes are in {folder}/session_latest/logs")
        keep_logs = True
        raise
    finally:
        ray.shutdown()
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)


def _own_cpus(options: LaunchOptions) -> int:
    cores = len(os.sched_getaffinity(0))
    workers = options.worker_range[1] if options.worker_range else DEFAULT_CPU_WORKERS
    cpus = options.cpus_per_worker or 1
    if workers * cpus > WORKERS_PER_CORE * cores:
        raise UsageError(
            f"{workers} workers of {_counted(cpus, 'CPU')} each were asked for, but this machine's {cores} cores "
            f"take at most {WORKERS_PER_CORE * cores}: lower --workers or --cpus-per-worker"
        )
    return max(cores, workers * cpus)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


@contextmanager
def _joined() -> Iterator[Cluster]:
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        _heed_interrupts()
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"no Ray answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}") from error
    try:
        yield Cluster(_nodes(), own=False)
    finally:
        ray.shutdown()


def _nodes() -> tuple[tuple[float, float], ...]:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return tuple((each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in resources)
