"""Measurement of loaders: new processes, one per GPU, that count the batches they take as fast as possible.

    start, first batches | barrier | warm-up | timed | barrier, end

Each measurement starts new processes, so that none inherits memory pools, page tables or CUDA's settings from another.
Repeats are interleaved over all rows of a table, so that a change in the machine's speed affects all rows equally.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from raydali.bench.image_loaders import Batches, Task
from raydali.bench.processes import CONTEXT, MeasurementError, run_ranks
from raydali.host import hardware
from raydali.text import duration, number, plural

WARM_UP = 0.2
"""Length of the warm-up, as a share of the timed segment's."""
USUAL_START = 6
"""Seconds from the start of a process to its first batch, before one was measured."""
START_SECONDS = 180
"""Limit for the start; on a cold machine the imports take half a minute."""
SLOWNESS = 10
"""The segments may last this number of times longer than requested, because they end with whole batches."""


@dataclass(frozen=True)
class Delivered:
    """Samples that a process counted in its timed segment, and the segment's length."""

    images: int
    seconds: float


def interleaved(
    rows: list[dict[str, Any]],
    task: Callable[[dict[str, Any]], Task],
    *,
    repeats: int,
    name: Callable[[dict[str, Any]], str],
    unit: str = "images",
    units_each: int = 1,
    limit: float = math.inf,
) -> None:
    """Measure every row `repeats` times; a row that failed is not measured again. Print when this will end.

    Args:
        rows: each with "gpus" and "error"; not measured unless that is null. They get "repeats" (the rates), "seconds"
            (measured, all repeats), "UNIT_per_second" (over all GPUs, the median), "low", "high" and, if one failed,
            "error".
        task: returns the task of a row's processes.
        repeats: how often each row is measured.
        name: names a row.
        unit: the unit that is counted.
        units_each: units per sample.
        limit: a repeat that would end after so many seconds is left out, unless it is the first.
    """
    for row in rows:
        row |= {"repeats": [], "seconds": 0.0}
    wanted = [row for row in rows if not row["error"]]
    of_repeat = sum(USUAL_START + (1 + WARM_UP) * task(row).seconds for row in wanted)
    began, done = time.monotonic(), 0

    def fitting() -> int:
        return int(min(repeats, max(1, limit / of_repeat)))

    expected = f"{plural(fitting(), 'repeat')} of {plural(len(wanted), 'row')}"
    print(f"measuring {expected}: about {duration(fitting() * of_repeat)}", file=sys.stderr, flush=True)
    for repeat in range(repeats):
        if repeat and repeat >= fitting():
            more = f"would end after {limit:g} s: --limit {math.ceil(repeats * of_repeat)} includes more"
            print(f"left out {plural(repeats - repeat, 'repeat')}, since the next one {more}", file=sys.stderr)
            break
        for row in wanted:
            if row["error"]:
                continue
            done += 1
            try:
                delivered = measure(task(row), row["gpus"])
            except MeasurementError as error:
                row["error"] = str(error)
                continue
            row["repeats"].append(units_each * sum(each.images / each.seconds for each in delivered))
            row["seconds"] += max(each.seconds for each in delivered)
            passed = time.monotonic() - began
            of_repeat = passed / done * len(wanted)
            left = f"{duration(max(0, fitting() * of_repeat - passed))} left"
            which = f"{repeat + 1}/{repeats} {name(row)}"
            print(f"{which}: {number(row['repeats'][-1])} {unit}/s, {left}", file=sys.stderr, flush=True)
    for row in rows:
        rates = row["repeats"] if not row["error"] else []
        row[f"{unit}_per_second"] = statistics.median(rates) if rates else None
        row["low"], row["high"] = (min(rates), max(rates)) if rates else (None, None)


def measure(task: Task, gpus: int) -> list[Delivered]:
    """Measure one process per GPU, or one on the CPU if `gpus` is 0.

    Raises:
        MeasurementError: a process failed or timed out.
    """
    world_size = max(1, gpus)
    together = replace(task, gpu=gpus > 0, world_size=world_size), CONTEXT.Barrier(world_size)
    timeout = START_SECONDS + SLOWNESS * (1 + WARM_UP) * task.seconds
    try:
        return run_ranks(_deliver, together, world_size, timeout=timeout, remedy="lower --batch-size")
    except MeasurementError as error:
        raise MeasurementError(f"{task.loader}, {error}") from error


def _deliver(together: tuple[Task, Any], rank: int, _: int) -> Delivered:
    task, barrier = together
    task = replace(task, rank=rank)
    if task.gpu and task.contender.all_queues:
        hardware.set_max_connections()
    with closing(task.contender.batches(task)) as batches:
        return _count(task, batches, barrier)


def _count(task: Task, batches: Batches, barrier: Any) -> Delivered:
    at_once = task.workers if task.contender.parallel else 1
    _take(batches, 0, at_once)
    barrier.wait()
    _take(batches, WARM_UP * task.seconds, at_once)
    _synchronize(task)
    start = time.perf_counter()
    taken = _take(batches, task.seconds, at_once)
    _synchronize(task)
    seconds = time.perf_counter() - start
    barrier.wait()  # no process is torn down while others are timed
    return Delivered(taken * task.batch_size, seconds)


def _take(batches: Batches, seconds: float, at_once: int) -> int:
    """Take bursts of batches until the time is up, one burst at least; return the number of batches."""
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
