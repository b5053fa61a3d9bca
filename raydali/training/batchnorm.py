"""BatchNorm over ranks and micro-batches: its running statistics, and SyncBatchNorm.

The statistics do not depend on the number of workers: every step updates them once, with the mean of the statistics of
all its micro-batches.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from raydali.training.worker import Worker


class RunningStatistics:
    """The running statistics of a model's BatchNorm layers.

    Each rank uses its own micro-batches. The update is linear, so the mean over ranks, weighted by their numbers of
    micro-batches, equals the result of one worker. Ranks compute it only before validation and checkpoints.

    Args:
        model: the unwrapped model. Its layers in evaluation mode are frozen: their statistics are left as they are.
        micro_batches: number of micro-batches of a global batch that this rank trains on.
        all_micro_batches: number of micro-batches in a global batch.

    Raises:
        ValueError: a layer has momentum=None: its cumulative average would depend on the number of batches.
    """

    def __init__(self, model: nn.Module, *, micro_batches: int, all_micro_batches: int) -> None:
        norms = (layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        layers = [layer for layer in norms if layer.track_running_stats and layer.training]
        if any(layer.momentum is None for layer in layers):
            raise ValueError("BatchNorm with momentum=None is not supported: its statistics depend on the batch count")
        self._buffers: list[torch.Tensor] = [
            buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None
        ]
        self._counts = [layer.num_batches_tracked for layer in layers if layer.num_batches_tracked is not None]
        self._micro_batches, self._all = micro_batches, all_micro_batches
        several = self._buffers if micro_batches > 1 else []
        self._before = [torch.empty_like(buffer) for buffer in several]
        self._sums = [torch.empty_like(buffer) for buffer in several]

    @torch.no_grad()
    def begin_micro_batch(self, index: int) -> None:
        """Prepare for a forward pass, which updates the buffers from their values at the beginning of the step.

        Args:
            index: the micro-batch's index among this rank's in the step.
        """
        if not self._sums:
            return
        if index == 0:
            torch._foreach_copy_(self._before, self._buffers)
        else:
            torch._foreach_copy_(self._buffers, self._before)
            torch._foreach_sub_(self._counts, 1)

    @torch.no_grad()
    def end_micro_batch(self, index: int) -> None:
        """Add the result of a forward pass to the sums, and set the statistics to their mean after the last one."""
        if not self._sums:
            return
        if index == 0:
            torch._foreach_copy_(self._sums, self._buffers)
        else:
            torch._foreach_add_(self._sums, self._buffers)
        if index == self._micro_batches - 1:
            torch._foreach_copy_(self._buffers, self._sums)
            torch._foreach_div_(self._buffers, self._micro_batches)

    @torch.no_grad()
    def average(self, worker: Worker) -> None:
        """Set the statistics to the weighted mean over ranks. All ranks must call it. The host does not wait for a GPU.

        Averaged again before the next step, they stay as they are.
        """
        if worker.world_size == 1 or not self._buffers:
            return
        share = self._micro_batches / self._all
        flat = torch.cat([buffer.flatten() for buffer in self._buffers]).double() * share
        worker.all_reduce(flat)
        torch._foreach_copy_(self._buffers, flat.split([len(buffer) for buffer in self._buffers]))


def with_sync_batchnorm(model: nn.Module, group: dist.ProcessGroup | None, *, fused: bool = False) -> nn.Module:
    """Return the model with SyncBatchNorm in place of BatchNorm; frozen layers stay in evaluation mode.

    With `fused`, PyTorch's own layers become layers of fused/layers.py.

    timm's layers of BatchNorm and activation would lose their activation in PyTorch's own conversion. Both conversions
    lose hooks, which stochastic depth needs (models/factories.py).
    """
    hooks = {name: module._forward_hooks for name, module in model.named_modules()}
    layers = sys.modules.get("timm.layers")
    convert = layers.convert_sync_batchnorm if layers else nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(model, group)
    for name, module in converted.named_modules():
        module._forward_hooks.update(hooks.get(name, {}))
        if fused and type(module) is nn.SyncBatchNorm:
            from raydali.training.fused.layers import SyncBatchNorm

            module.__class__ = SyncBatchNorm
    return converted
