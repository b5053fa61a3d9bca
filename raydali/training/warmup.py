"""Warm-up steps, which compile, capture a CUDA graph and measure the ceiling, and are undone afterwards."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from raydali.host import start_clock
from raydali.host.cpu_times import CpuTimes, cpu_times
from raydali.measure.ceiling import MAX_SECONDS, Ceiling, ceiling_images_per_second, disturbed, synchronize
from raydali.measure.gpu_busy import busy_seconds
from raydali.training.checkpoint_file import snapshot
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker

Step = TypeVar("Step")

MIN_CPU_SECONDS = 0.5
"""With less CPU time, shares of it are unreliable: the kernel counts all processes in units of 0.01 s."""


def warm_up_steps(differentiated: Sequence[ForwardBackward], device: torch.device) -> int:
    """Return the number of steps after which nothing is compiled, tuned or captured any more; 1 on a CPU.

    The last one is for Muon, which is captured a step after the backward pass.
    """
    most = max((function.warm_up_steps for function in differentiated), default=WARM_UP_STEPS)
    return most + 2 if device.type == "cuda" else 1


def warm_up(
    take: Callable[[], Step],
    modules: Sequence[nn.Module],
    optimizer: Optimizer,
    precision: Precision,
    worker: Worker,
    *,
    differentiated: Sequence[ForwardBackward],
    steps: int,
    images: int,
    measures_ceiling: bool,
) -> Generator[Step, None, Ceiling]:
    """Yield the steps that compile, tune and capture while the loader is idle. All ranks must call it.

    Args:
        take: makes a step on a resident batch.
        modules: the modules that a step changes: the model and its moving average.
        optimizer: the optimizer of the model.
        precision: the precision of the steps.
        worker: this rank.
        differentiated: the functions that a step calls.
        steps: number of steps before the measurement, see `warm_up_steps`.
        images: number of images in one step of this rank.
        measures_ceiling: whether to measure the ceiling afterwards.

    Returns:
        The ceiling; its values are empty if it was not measured.
    """
    with _undone(modules, optimizer, precision):
        began = time.perf_counter()
        for index in range(steps):
            yield take()
            if index in (0, steps - 1):
                synchronize(worker.device)
                start_clock.mark("capture" if index else "compile")
        if not measures_ceiling:
            return Ceiling()
        measured = yield from _measured(take, worker, images, seconds_of_step=time.perf_counter() - began)
        rate = measured.images_per_second
        if rate and worker.device.type == "cuda" and not all(function.is_captured for function in differentiated):
            measured = replace(measured, gpu_busy=(yield from _gpu_busy(take, worker, images, rate)))
        return measured


def _gpu_busy(
    take: Callable[[], Step], worker: Worker, images: int, rate: float
) -> Generator[Step, None, float | None]:
    of_ranks = worker.exchange(((yield from busy_seconds(take, worker.device)), images))
    seconds_of_step = sum(images for _, images in of_ranks) / rate
    busy = fmean(seconds for seconds, _ in of_ranks) / seconds_of_step
    return min(1.0, busy) or None


def _measured(
    take: Callable[[], Step], worker: Worker, images: int, *, seconds_of_step: float
) -> Generator[Step, None, Ceiling]:
    on_cpu = worker.device.type == "cpu"
    taken = max(worker.exchange(seconds_of_step))
    if on_cpu and taken > MAX_SECONDS:
        return Ceiling(why=f"a step takes {taken:.0f} s, and none of more than {MAX_SECONDS:.0f} s is measured")
    before = cpu_times()
    rate = yield from ceiling_images_per_second(take, images, worker.device, worker.sum)
    after = cpu_times()
    start_clock.mark("ceiling")
    spent = after - before if before is not None and after is not None else None
    # Other processes on the host hardly affect the steps of a GPU.
    by_others = disturbed(worker.exchange(_on_host(worker, spent))) if on_cpu else ""
    return Ceiling(None, by_others, void=True) if by_others else Ceiling(rate)


def _on_host(worker: Worker, spent: CpuTimes | None) -> dict[str, str | float | None]:
    reliable = spent if spent is not None and spent.busy >= MIN_CPU_SECONDS else None
    return {
        "node": worker.node,
        "cpu_seconds": reliable.own if reliable else None,
        "host_busy_seconds": reliable.busy if reliable else None,
        "host_idle_seconds": reliable.idle if reliable else None,
    }


@contextmanager
def _undone(modules: Sequence[nn.Module], optimizer: Optimizer, precision: Precision) -> Iterator[None]:
    """Restore weights, buffers, momenta and the loss scale at the end of this context, bit for bit.

    Tensors keep their addresses, which a CUDA graph has captured. The host needs memory for a copy of modules and
    momenta.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    copies, momenta = snapshot([tensors, optimizer.state_dict()])
    scale = precision.scaler.state_dict()
    try:
        yield
        # It allocates pinned memory for momenta, which checkpoints use again, and for the loss that is read meanwhile.
        snapshot([optimizer.state_dict(), torch.zeros((), dtype=torch.float64, device=tensors[0].device)])
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        optimizer.load_state_dict(momenta)
        precision.scaler.load_state_dict(scale)
