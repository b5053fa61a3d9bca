"""Steps that leave no trace: to compile, to capture and to measure on the model itself, before or amid training."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from raydali.host.cpu_times import CpuTimes, cpu_times
from raydali.measure.ceiling import LONGEST_SECONDS, Ceiling, ceiling_images_per_second, disturbed
from raydali.train.checkpoint_file import snapshot
from raydali.train.precision import Precision
from raydali.train.step import WARM_UP_STEPS
from raydali.train.worker import Worker

LEAST_TOLD = 0.5
"""Seconds of computing: the kernel counts those of all processes in steps of 0.01."""


def warm_up_steps(device: torch.device) -> int:
    """Steps until nothing is compiled, tuned or captured any more: a CPU does all that in the first one."""
    return WARM_UP_STEPS + 1 if device.type == "cuda" else 1


def warm_up(
    step: Callable[[], object],
    modules: Sequence[nn.Module],
    optimizer: Optimizer,
    precision: Precision,
    worker: Worker,
    *,
    steps: int,
    images: int,
    measures_ceiling: bool,
) -> Ceiling:
    """Take the steps that compile, tune and capture, while the loader is not at work; all ranks must call it.

    Args:
        step: one optimiser step on a resident batch.
        modules: all that it changes: the model, and its moving average.
        steps: before measuring, see `warm_up_steps`.
        images: that the step consumes on this rank.

    Returns:
        The ceiling, empty where it is not to be measured.
    """
    with _undone(modules, optimizer, precision):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if not measures_ceiling:
            return Ceiling()
        on_cpu = worker.device.type == "cpu"
        taken = max(worker.exchange(time.perf_counter() - began))
        if on_cpu and taken > LONGEST_SECONDS:
            return Ceiling(why=f"a step takes {taken:.0f} s, and none of more than {LONGEST_SECONDS:.0f} s is measured")
        before = cpu_times()
        rate = ceiling_images_per_second(step, images, worker.device, worker.sum)
        after = cpu_times()
        spent = after - before if before is not None and after is not None else None
        # A GPU's steps need the host for little.
        by_others = disturbed(worker.exchange(_on_host(worker, spent))) if on_cpu else ""
        return Ceiling(None, by_others, void=True) if by_others else Ceiling(rate)


def _on_host(worker: Worker, spent: CpuTimes | None) -> dict[str, str | float | None]:
    known = spent if spent is not None and spent.busy >= LEAST_TOLD else None
    return {
        "node": worker.node,
        "cpu_seconds": known.own if known else None,
        "host_busy_seconds": known.busy if known else None,
        "host_idle_seconds": known.idle if known else None,
    }


@contextmanager
def _undone(modules: Sequence[nn.Module], optimizer: Optimizer, precision: Precision) -> Iterator[None]:
    """Whatever is trained inside is undone behind it: weights, buffers, momenta and the loss scale, bit for bit.

    Inside, the learning rate is 0, so that weights stay what they are, and steps as long as in earnest. Tensors keep
    their places in memory, where a CUDA graph finds them. Costs a copy of modules and momenta on the host while it
    lasts.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    copies, momenta = snapshot([tensors, optimizer.state_dict()])
    scale = precision.scaler.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        optimizer.load_state_dict(momenta)
        precision.scaler.load_state_dict(scale)
