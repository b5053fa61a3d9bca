"""Resolve the requested workers against the cluster and what its autoscaler could add, or refuse them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from raydali.errors import UsageError
from raydali.launch.driver.cluster import Cluster
from raydali.options.placement import PlacementOptions
from raydali.text import plural

DEFAULT_CPU_WORKERS = 2


@dataclass(frozen=True)
class Placement:
    """The number of workers, and what each one reserves.

    Attributes:
        minimum, maximum: a run of MIN:MAX workers is elastic.
        reachable: how many of `maximum` the cluster can ever hold, as far as known. An autoscaler adds nothing if more
            is requested than it may add.
    """

    minimum: int
    maximum: int
    cpus: int
    gpu: bool
    reachable: int

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during the run."""
        return self.minimum < self.reachable

    def __str__(self) -> str:
        return f"{plural(self.cpus, 'CPU')}{' and 1 GPU' if self.gpu else ''} each"


def resolve_placement(options: PlacementOptions, cluster: Cluster) -> Placement:
    """Return the placement that the options request of this cluster, with defaults filled in.

    Workers default to one per GPU, or 2 on CPUs; CPUs per worker to the cores per GPU, or an equal share.

    Raises:
        UsageError: the request can never be met; names both figures and what would fit.
    """
    gpu = options.gpu or (cluster.gpus_at_most > 0 and not options.no_gpu)
    if gpu and not cluster.gpus_at_most and cluster.growth.known:
        raise UsageError(f"--gpu asks for GPUs, but the cluster has none ({cluster}): leave it out, or add GPUs")
    if gpu and not cluster.gpus and options.worker_range is None:
        raise UsageError(f"the cluster has no GPUs yet ({cluster}): give a number of --workers, or --no-gpu")
    minimum, maximum = options.worker_range or ((cluster.gpus,) * 2 if gpu else (DEFAULT_CPU_WORKERS,) * 2)
    cpus = options.cpus_per_worker or _share(cluster, maximum, gpu)
    reachable = cluster.reachable(cpus, gpu)
    if reachable < minimum and cluster.growth.known:
        placement = Placement(minimum, maximum, cpus, gpu, reachable)
        raise UsageError(
            f"the cluster ({cluster}) has room for {reachable} of {plural(minimum, 'worker')} of "
            f"{placement}: {_what_would_fit(placement, cluster)}"
        )
    limited = bool(cluster.growth.groups)
    return Placement(minimum, maximum, cpus, gpu, min(maximum, reachable) if limited else maximum)


def _share(cluster: Cluster, workers: int, gpu: bool) -> int:
    """Return the default number of CPUs of each worker."""
    if gpu:
        return max(1, min((int(c // g) for c, g in cluster.kinds if g), default=1))
    shares = range(max(1, int(max(c for c, _ in cluster.kinds))), 0, -1)
    now = (share for share in shares if cluster.fitting(share, gpu) >= workers)
    later = (share for share in shares if cluster.reachable(share, gpu) >= workers)
    return next(now, None) or next(later, 1)


def _what_would_fit(asked: Placement, cluster: Cluster) -> str:
    """Describe the nearest requests that would fit: fewer workers, fewer CPUs each, or both."""
    requests = list(_nearest(asked, cluster))
    if requests:
        return f"{' or '.join(requests)} would fit"
    return "give --no-gpu" if asked.gpu and cluster.reachable(1, gpu=False) else "add nodes"


def _nearest(asked: Placement, cluster: Cluster) -> Iterator[str]:
    most = "" if asked.minimum == asked.maximum else f":{asked.maximum}"
    if asked.reachable > 0:
        yield f"--workers {asked.reachable}{most}"
    fewer = [(cpus, cluster.reachable(cpus, asked.gpu)) for cpus in range(asked.cpus - 1, 0, -1)]
    enough = [cpus for cpus, workers in fewer if workers >= asked.minimum]
    if enough:
        yield f"--cpus-per-worker {enough[0]}"
    elif asked.reachable <= 0:
        yield from islice((f"--workers {n}{most} --cpus-per-worker {cpus}" for cpus, n in fewer if n > 0), 1)
