"""Steps that leave no trace: to compile, to capture and to measure on the model itself before it is trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from torch.optim import Optimizer

from raydali.measure.ceiling import ceiling_images_per_second
from raydali.train.precision import Precision
from raydali.train.step import WARM_UP_STEPS
from raydali.train.worker import Worker


def rehearse(
    step: Callable[[], object],
    modules: Sequence[nn.Module],
    optimizer: Optimizer,
    precision: Precision,
    worker: Worker,
    *,
    images: int,
    measures_ceiling: bool,
) -> float | None:
    """Take the steps that compile, tune and capture, before the loader is at work; all ranks must call it.

    Args:
        step: one optimiser step on a resident batch.
        modules: all that it changes: the model, and its moving average.
        images: that the step consumes on this rank.

    Returns:
        The ceiling in images a second over all ranks, or None where it is not to be measured.
    """
    with _undone(modules, optimizer, precision):
        # A CPU has nothing to capture; what it compiles, it does in the first step.
        for _ in range(WARM_UP_STEPS + 1 if worker.device.type == "cuda" else 1):
            step()
        return ceiling_images_per_second(step, images, worker.device, worker.sum) if measures_ceiling else None


@contextmanager
def _undone(modules: Sequence[nn.Module], optimizer: Optimizer, precision: Precision) -> Iterator[None]:
    """Whatever is trained inside is undone behind it: weights, buffers, momenta and the loss scale, bit for bit.

    Inside, the learning rate is 0, so that weights stay what they are, and steps as long as in earnest. Tensors keep
    their places in memory. Costs a copy of the modules on the device while it lasts.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    copies = [tensor.detach().clone() for tensor in tensors]
    momenta, scale = deepcopy(optimizer.state_dict()), precision.scaler.state_dict()
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
