"""Running statistics of BatchNorm that do not depend on the number of workers.

Every step updates the running statistics once, with the mean of the statistics of all its micro-batches. Each rank uses
its own micro-batches. The update is linear, so the mean over ranks, weighted by their numbers of micro-batches, equals
the result of one worker. Ranks compute it in each step, together with the gradients' sum, so that a lost rank takes no
share along; where DDP sums the gradients, they compute it only before validation and checkpoints.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from raydali.train.worker import Worker


class RunningStatistics:
    """The running statistics of a model's BatchNorm layers.

    Args:
        model: the unwrapped model. Its layers in evaluation mode are frozen: their statistics are left as they are.
        micro_batches: number of micro-batches of a global batch that this rank trains on.
        all_micro_batches: number of micro-batches in a global batch.
        each_step: whether `set_means` gets the sums over all ranks.

    Attributes:
        sums: the sums over the newest step's micro-batches on this rank; empty if no step needs them.

    Raises:
        ValueError: a layer has momentum=None: its cumulative average would depend on the number of batches.
    """

    def __init__(
        self, model: nn.Module, *, micro_batches: int, all_micro_batches: int, each_step: bool = False
    ) -> None:
        norms = (layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        layers = [layer for layer in norms if layer.track_running_stats and layer.training]
        if any(layer.momentum is None for layer in layers):
            raise ValueError("BatchNorm with momentum=None is not supported: its statistics depend on the batch count")
        self._buffers: list[torch.Tensor] = [
            buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None
        ]
        self._counts = [layer.num_batches_tracked for layer in layers if layer.num_batches_tracked is not None]
        self._share, self._each_step = micro_batches / all_micro_batches, each_step
        self._all, self._trained, self._is_begun = all_micro_batches, 0, False
        copies = self._buffers if micro_batches > 1 or each_step else []
        self._before = [torch.empty_like(buffer) for buffer in copies]
        self.sums = [torch.empty_like(buffer) for buffer in copies]

    @torch.no_grad()
    def begin_micro_batch(self, index: int) -> None:
        """Prepare for a forward pass, which updates the buffers from their values at the beginning of the step.

        Args:
            index: the micro-batch's index among those of this rank in the step.
        """
        self._begin()
        if self._before and index:
            torch._foreach_sub_(self._counts, 1)

    def _begin(self) -> None:
        if self._before and not self._is_begun:
            torch._foreach_copy_(self._before, self._buffers)
        elif self._before:
            torch._foreach_copy_(self._buffers, self._before)
        self._is_begun = True

    @torch.no_grad()
    def end_micro_batch(self, index: int) -> None:
        """Add the result of a forward pass to the sums; see `begin_micro_batch`."""
        self._trained = index + 1
        if self.sums and index == 0:
            torch._foreach_copy_(self.sums, self._buffers)
        elif self.sums:
            torch._foreach_add_(self.sums, self._buffers)

    @torch.no_grad()
    def sit_out(self) -> None:
        """Begin a step in which this rank has no micro-batches, or none yet."""
        self._begin()
        for each in self.sums:
            each.zero_()

    @torch.no_grad()
    def set_means(self, over_ranks: list[torch.Tensor] | None = None) -> None:
        """Set the statistics to their mean over the step's micro-batches of this rank, or of all ranks.

        Until `end_step`, a loss may prove the sums wrong; `before_step` still has the values before.

        Args:
            over_ranks: the sums of all ranks' `sums`; None for the mean over those of this rank.
        """
        if self.sums:
            torch._foreach_copy_(self._buffers, over_ranks or self.sums)
            torch._foreach_div_(self._buffers, self._all if over_ranks else self._trained)

    @torch.no_grad()
    def end_step(self) -> None:
        """Note that the statistics are those after the step."""
        if not self._trained and self._counts:
            torch._foreach_add_(self._counts, 1)
        self.discard_step()

    def discard_step(self) -> None:
        """Forget the passes of the current step: the statistics are those after it."""
        self._trained, self._is_begun = 0, False

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Set the statistics to those before the current step, if it has begun, inside this context."""
        if not self._before or not self._is_begun:
            yield
            return
        now, trained = [buffer.clone() for buffer in self._buffers], int(self._trained > 0)
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, self._before)
            torch._foreach_sub_(self._counts, trained)
        yield
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, now)
            torch._foreach_add_(self._counts, trained)

    @torch.no_grad()
    def average(self, worker: Worker) -> None:
        """Set the statistics to the weighted mean over ranks, unless each step does. All ranks must call it.

        The host does not wait for a GPU.
        """
        if worker.world_size == 1 or self._each_step or not self._buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in self._buffers]).double() * self._share
        worker.all_reduce(flat)
        torch._foreach_copy_(self._buffers, flat.split([len(buffer) for buffer in self._buffers]))


def with_sync_batchnorm(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model with SyncBatchNorm in place of BatchNorm; frozen layers stay in evaluation mode.

    timm's layers of BatchNorm and activation would lose their activation in PyTorch's own conversion. Both conversions
    lose hooks, which stochastic depth needs (models/drop_path.py).
    """
    hooks = {name: module._forward_hooks for name, module in model.named_modules()}
    layers = sys.modules.get("timm.layers")
    convert = layers.convert_sync_batchnorm if layers else nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(model, group)
    for name, module in converted.named_modules():
        module._forward_hooks.update(hooks.get(name, {}))
    return converted
