"""One measurement: fresh processes, one a GPU, that take batches as fast as they come and count.

    start, first batches | all wait for each other | warm-up | timed | all wait for each other, end

Every measurement pays for its own start, so that none inherits memory pools, page tables or CUDA's settings from
another's.
"""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from raydali.bench.common.processes import CONTEXT, RanksFailed, run_ranks
from raydali.bench.loader.contenders import Deliveries, Task
from raydali.host.cuda_queues import HARDWARE_QUEUES, VARIABLE

WARM_UP = 0.2
"""Before the timed stretch, in units of its length."""
START_SECONDS = 180
"""How long a start may take; on a cold machine the imports alone take half a minute."""
SLOWNESS = 10
"""How much longer than asked for the stretches may last: they end with whole batches."""


class MeasurementFailed(Exception):
    """No rate could be measured; the message says where and ends with the reason, in most cases a traceback."""


@dataclass(frozen=True)
class Delivered:
    """What a process counted in its timed stretch."""

    images: int
    seconds: float


def measure(task: Task, gpus: int) -> list[Delivered]:
    """What each process delivered, of one process a GPU, or of one on the CPU where `gpus` is 0.

    Raises:
        MeasurementFailed: a process failed, or was not done in time.
    """
    world_size = max(1, gpus)
    together = replace(task, gpu=gpus > 0, world_size=world_size), CONTEXT.Barrier(world_size)
    try:
        return run_ranks(
            _deliver,
            together,
            world_size,
            timeout=START_SECONDS + SLOWNESS * (1 + WARM_UP) * task.seconds,
            remedy="lower --batch-size",
            environment={VARIABLE: str(HARDWARE_QUEUES)} if task.measured.all_queues else {},
        )
    except RanksFailed as error:
        raise MeasurementFailed(f"{task.loader}, {error}") from error


def _deliver(together: tuple[Task, Any], rank: int, port: int) -> Delivered:
    task, barrier = together
    task = replace(task, rank=rank)
    with closing(task.measured.deliver(task)) as batches:
        return _count(task, batches, barrier)


def _count(task: Task, batches: Deliveries, barrier: Any) -> Delivered:
    at_once = task.workers if task.measured.parallel else 1
    _take(batches, 0, at_once)
    barrier.wait()
    _take(batches, WARM_UP * task.seconds, at_once)
    _synchronize(task)
    start = time.perf_counter()
    taken = _take(batches, task.seconds, at_once)
    _synchronize(task)
    seconds = time.perf_counter() - start
    barrier.wait()  # nobody tears down while others are timed
    return Delivered(taken * task.batch_size, seconds)


def _take(batches: Deliveries, seconds: float, at_once: int) -> int:
    """Take bursts of batches until the time is up, one burst at least; their number."""
    end = time.perf_counter() + seconds
    for bursts in count(1):
        for _ in range(at_once):
            next(batches)
        if time.perf_counter() >= end:
            return bursts * at_once
    raise AssertionError("endless")


def _synchronize(task: Task) -> None:
    if task.gpu:
        import torch

        torch.cuda.synchronize(task.device)
