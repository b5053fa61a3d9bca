"""BatchNorm's running statistics, made independent of the number of workers without traffic per step.

Every step moves the running statistics once, by the mean of the statistics of all its micro-batches. A rank does
that over its own micro-batches. As the update is linear, the mean over ranks, weighted by their micro-batches, is
exactly what one worker would have got; it is taken only when it is used: in validation and in checkpoints.
"""

import torch
from torch import nn

from raydali.train.worker import Worker


class RunningStatistics:
    """Keeps the running statistics of a model's BatchNorm layers.

    Args:
        model: the unwrapped model.
        micro_batches: how many of a global batch's micro-batches this rank takes.
        all_micro_batches: A, those of all ranks.

    Raises:
        ValueError: a layer with momentum=None: a cumulative average depends on the number of batches seen.
    """

    def __init__(self, model: nn.Module, *, micro_batches: int, all_micro_batches: int) -> None:
        norms = (layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        layers = [layer for layer in norms if layer.track_running_stats]
        if any(layer.momentum is None for layer in layers):
            raise ValueError("BatchNorm with momentum=None is not supported: its statistics depend on the batch count")
        self._buffers: list[torch.Tensor] = [
            buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None
        ]
        self._counts = [layer.num_batches_tracked for layer in layers if layer.num_batches_tracked is not None]
        self._micro_batches = micro_batches
        self._share = micro_batches / all_micro_batches
        self._before: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Call before the first micro-batch of a step."""
        if self._micro_batches > 1 and self._buffers:
            self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def after_micro_batch(self, index: int) -> None:
        """Call after each forward pass, with its index among this rank's micro-batches of the step.

        Each forward pass moves the buffers from their values at the beginning of the step. The mean of the results over
        the step's micro-batches is kept. With one micro-batch per step this is what BatchNorm itself does.
        """
        if self._micro_batches == 1 or not self._buffers:
            return
        if index == 0:
            self._sums = [buffer.clone() for buffer in self._buffers]
        else:
            torch._foreach_add_(self._sums, self._buffers)
        if index < self._micro_batches - 1:
            torch._foreach_copy_(self._buffers, self._before)
            torch._foreach_sub_(self._counts, 1)
        else:
            torch._foreach_div_(self._sums, self._micro_batches)
            torch._foreach_copy_(self._buffers, self._sums)

    @torch.no_grad()
    def average(self, worker: Worker) -> None:
        """Set every rank's statistics to those over all ranks. All ranks must call it."""
        if worker.world_size == 1 or not self._buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in self._buffers]).double() * self._share
        total = worker.sum(flat).to(flat.device)
        for buffer, part in zip(self._buffers, total.split([len(b) for b in self._buffers]), strict=True):
            buffer.copy_(part)
