"""Runs inference on workers: in this process, or on a Ray cluster with a Ray actor for each worker."""

import logging
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch

from raydali.errors import CommandError, UsageError
from raydali.host.cpu_times import usable_cores
from raydali.host.hardware import set_max_connections
from raydali.inference.engine import Inference, PartResult
from raydali.inference.job_module import PREFIX
from raydali.inference.parts import Part
from raydali.launch.driver.placement import resolve_placement
from raydali.launch.driver.ray_cluster import connect
from raydali.launch.trainer import WORKER_ENVIRONMENT
from raydali.options.inference import WAIT_POLICY
from raydali.options.placement import PlacementOptions
from raydali.output import gpu_names
from raydali.text import error_line, plural, rate_text

MAX_FAILURES = 3
"""Failures of workers, in a row without a part that was done, after which the command ends."""
LINE_SECONDS = 10.0
RESULTS_AHEAD = 4
"""Results of a worker that may wait for the driver."""

_log = logging.getLogger(__name__)


def results(
    inference: Inference, parts: Sequence[Part], options: PlacementOptions
) -> Generator[PartResult, None, None]:
    """Yield the results of some parts, in any order; shows the progress of slow ones.

    Without a cluster, one worker needs no Ray. A part of a worker that has died is done by another. Loaders and workers
    are in use until it ends or is closed.

    Args:
        inference: the model and the samples.
        parts: those to do.
        options: number of workers and what each one gets.

    Raises:
        UsageError: the cluster cannot hold the workers.
        CommandError: workers fail again and again.
        DataError, StorageAway: the samples cannot be read.
    """
    done, total, printed = 0, sum(len(part.ids) for part in parts), time.monotonic()
    for result in _results(inference, parts, options):
        done += len(result.part.ids)
        if time.monotonic() - printed >= LINE_SECONDS:
            printed = time.monotonic()
            rate = rate_text(done / max(result.seconds, 1e-9))
            print(f"{done:,} of {plural(total, inference.task_results.noun)}, {rate}/s", file=sys.stderr)
        yield result


def _results(inference: Inference, parts: Sequence[Part], options: PlacementOptions) -> Iterator[PartResult]:
    most = options.worker_range[1] if options.worker_range else max(1, 0 if options.no_gpu else len(gpu_names()))
    if not os.environ.get("RAY_ADDRESS") and most == 1:
        gpu = bool(gpu_names()) and not options.no_gpu
        if options.gpu and not gpu:
            raise UsageError("--gpu asks for a GPU, but this machine has none: leave it out")
        if gpu:
            set_max_connections()
        device = torch.device("cuda:0" if gpu else "cpu")
        yield from inference.results(parts, device, options.cpus_per_worker or usable_cores())
        return
    with connect(options, _log.warning) as connected:
        placement = resolve_placement(options, connected.look())
        yield from _on_ray(inference, parts, placement.reachable, placement.cpus, gpu=placement.gpu)


def _on_ray(inference: Inference, parts: Sequence[Part], workers: int, cpus: int, *, gpu: bool) -> Iterator[PartResult]:
    import ray

    class InferenceWorker:
        def results(self, inference: Inference, parts: Sequence[Part], cpus: int) -> Iterator[PartResult]:
            yield from inference.results(parts, torch.device("cuda:0" if gpu else "cpu"), cpus)

    for name, module in sys.modules.items():
        if name.startswith(PREFIX):
            ray.cloudpickle.register_pickle_by_value(module)
    environment = {"env_vars": WORKER_ENVIRONMENT | dict([WAIT_POLICY])}
    actor: Any = ray.remote(num_cpus=cpus, num_gpus=int(gpu), runtime_env=environment)(InferenceWorker)
    shared = ray.put(inference)
    remaining, failures = {part.number: part for part in parts}, 0
    while remaining:
        shares = [share for share in ([*remaining.values()][rank::workers] for rank in range(workers)) if share]
        actors = [actor.remote() for _ in shares]
        streams: dict[Any, Any] = {}
        for worker, share in zip(actors, shares, strict=True):
            method = worker.results.options(num_returns="streaming", _generator_backpressure_num_objects=RESULTS_AHEAD)
            streams[method.remote(shared, share, cpus)] = worker
        while streams:
            ready: Any = ray.wait([*streams], num_returns=1, fetch_local=False)[0][0]
            try:
                result = ray.get(next(ready))
            except StopIteration:
                del streams[ready]
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None
            except ray.exceptions.RayError as error:
                failures += 1
                del streams[ready]
                _log.warning("a worker has ended (%s): its parts are done again", error_line(error)[:80])
                if failures >= MAX_FAILURES:
                    raise CommandError(
                        f"{plural(failures, 'worker')} ended without a result in between: see Ray's logs"
                    ) from error
            else:
                failures = 0
                remaining.pop(result.part.number, None)
                yield result
        for worker in actors:
            ray.kill(worker)
