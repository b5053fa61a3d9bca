"""One measurement: fresh processes, one a GPU, that take batches as fast as they come and count.

    start, first batches | all wait for each other | warm-up | timed | all wait for each other, end

Every measurement pays for its own start, so that none inherits memory pools, page tables or CUDA's settings from
another's.
"""

import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import connection, get_context
from typing import Any

from raydali.bench.loaders import Deliveries, Task
from raydali.data.hardware_queues import HARDWARE_QUEUES, VARIABLE

WARM_UP = 0.2
"""Before the timed stretch, in units of its length."""
START_SECONDS = 180
"""How long a start may take; on a cold machine the imports alone take half a minute."""
END_SECONDS = 10
"""How long an end may take: whoever is not gone then is killed."""
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
    context = get_context("spawn")
    world_size = max(1, gpus)
    barrier = context.Barrier(world_size)
    limit = START_SECONDS + SLOWNESS * (1 + WARM_UP) * task.seconds
    deadline = time.monotonic() + limit
    processes, pending = [], {}
    try:
        with _environment({VARIABLE: str(HARDWARE_QUEUES)} if task.measured.all_queues else {}):
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                own = replace(task, gpu=gpus > 0, rank=rank, world_size=world_size)
                # No daemon, which could not have the DataLoader's worker processes.
                process = context.Process(target=_run, args=(own, barrier, sender))
                process.start()
                processes.append(process)
                sender.close()
                pending[receiver] = rank
        results: dict[int, Delivered] = {}
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, pending.values()))
                raise MeasurementFailed(f"{task.loader}, process {late}: not done after {limit:.0f} s")
            for receiver in [receiver for receiver in pending if receiver in ready]:
                rank = pending.pop(receiver)
                results[rank] = _result(receiver, task, rank, processes[rank])
        for process in processes:
            process.join(END_SECONDS)
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(receiver: "connection.Connection[Any, Any]", task: Task, rank: int, process: Any) -> Delivered:
    try:
        delivered, error = receiver.recv()
    except EOFError:
        process.join()
        error = f"the process ended with exit code {process.exitcode} and said nothing"
    if error is not None:
        raise MeasurementFailed(f"{task.loader}, process {rank}: {error}")
    assert isinstance(delivered, Delivered)
    return delivered


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(task: Task, barrier: Any, sender: "connection.Connection[Any, Any]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
    try:
        batches = task.measured.deliver(task)
        sender.send((_count(task, batches, barrier), None))
    except Exception:
        sender.send((None, traceback.format_exc()))
    else:
        batches.close()


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
