"""Options that do not fit together, or not the cluster: an error for what cannot be used, a warning for the rest."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.host.cpu_times import usable_cores
from raydali.launch.choices import window_warning
from raydali.launch.driver.placement import Cluster, Placement
from raydali.launch.driver.ray_cluster import check_own_ray
from raydali.launch.options import LaunchOptions
from raydali.text import plural


def check(options: LaunchOptions, samples: int, placement: Placement | None = None) -> None:
    """Refuse options that cannot be used; with a placement also those that depend on the cluster.

    Raises:
        UsageError: names the values that do not fit together, and the remedy.
    """
    if placement is None:
        check_own_ray(options)
        workers = options.worker_range[1] if options.worker_range else 1
    else:
        workers = placement.maximum
    global_batch_size = options.global_batch_size or options.batch_size * workers
    stream = replace(options, global_batch_size=global_batch_size).stream(samples)
    stream.micro_batches_of(0, workers)
    if getattr(options, "optimizer", "") in ("lamb", "lars"):
        require_extra("timm", "timm", "LAMB and LARS")
    if not options.sync_bn:
        return
    if options.no_gpu or (placement is not None and not placement.gpu):
        raise UsageError("--sync-bn needs GPUs, and this run trains on CPUs: leave it out, or train on GPUs")
    if options.workers is not None and ":" in options.workers:
        raise UsageError(f"--sync-bn needs a fixed number of workers, not --workers {options.workers}")
    if stream.micro_batches_per_step % workers:
        raise UsageError(
            f"--sync-bn needs a number of workers that divides the {stream.micro_batches_per_step} micro-batches of a "
            f"global batch, not {workers}: lower --workers, or raise --global-batch-size"
        )


def warnings_of(
    options: LaunchOptions, placement: Placement, cluster: Cluster, samples: int, labels: NDArray[np.int64] | None
) -> Iterator[str]:
    """Yield what makes a run slow or fragile, whose global batch size is known."""
    assert options.global_batch_size is not None
    workers, cores = placement.maximum, usable_cores()
    batch_size = min(options.batch_size, samples // (2 * workers))
    if batch_size and samples < 2 * options.global_batch_size:
        smaller = f"--batch-size {batch_size} " if batch_size < options.batch_size else ""
        most = samples // 2 // (batch_size * workers) * batch_size * workers
        yield (
            f"an epoch of {plural(samples, 'sample')} has fewer than two global batches of "
            f"{options.global_batch_size}, and may get no line: give at most {smaller}--global-batch-size {most}"
        )
    if warning := window_warning(options, samples, labels):
        yield warning
    if cluster.own and workers * placement.cpus > cores:
        yield (
            f"{plural(workers, 'worker')} of {placement} share {plural(cores, 'core')}, which makes them slow: "
            "lower --workers or --cpus-per-worker"
        )
    batches = options.global_batch_size // options.batch_size
    if batches % workers:
        yield (
            f"{workers} workers cannot share {plural(batches, 'micro-batch')} of a step equally, so some wait: "
            f"give a number of --workers that divides {batches}"
        )
    if placement.minimum < workers and not options.checkpoint_every:
        yield (
            f"with --workers {options.workers}, a lost node costs all steps since the newest checkpoint, up to an "
            "epoch: set --checkpoint-every"
        )
    if placement.reachable < workers:
        yield f"the cluster ({cluster}) has room for {placement.reachable} of at most {plural(workers, 'worker')}"
