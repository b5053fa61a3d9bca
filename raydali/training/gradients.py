"""The sum of gradients over all ranks: one all-reduce after a step's last backward pass.

DistributedDataParallel all-reduces parts of the gradients during this pass instead. On CPUs, the all-reduce then takes
the cores from the pass. Where GPUs have fast connections, one all-reduce as the last part of the pass's CUDA graph is
faster: DDP's copies of gradients into its buckets, each with a kernel of its own, take longer than the all-reduce.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from raydali.training.worker import Worker

_DDP_SECONDS_PER_GRADIENT = 6e-6
"""DDP takes this time for each gradient in a CUDA graph, in addition to its all-reduce."""
_ALIGNMENT = 16
"""Elements at which each tensor in a flat buffer begins: kernels read aligned tensors faster."""


def ddp_is_slower(parameters: Sequence[nn.Parameter], worker: Worker) -> bool:
    """Measure whether one all-reduce of all gradients takes less time than DDP's overhead. All ranks must call it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    count = sum(parameter.numel() for parameter in parameters)
    gradients = torch.zeros(count, dtype=parameters[0].dtype, device=worker.device)
    for event in events:
        worker.all_reduce(gradients)
        event.record()
    events[-1].synchronize()
    mine = min(before.elapsed_time(after) for before, after in pairwise(events)) / 1000
    seconds: float = max(worker.exchange(mine))
    return seconds < _DDP_SECONDS_PER_GRADIENT * len(parameters)


class GradientSums:
    """Gradients of a model in fixed memory: sums over micro-batches, and over all ranks with an all-reduce per dtype.

    All ranks must call `all_reduce` at the same steps.

    Args:
        model: a model with trained parameters. Its parameters and buffers get the values of rank 0, as in DDP.
    """

    def __init__(self, model: nn.Module, worker: Worker) -> None:
        worker.broadcast([*model.parameters(), *model.buffers()])
        self._worker = worker
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._has_gradient = self._parameters[0].new_ones(len(self._parameters), requires_grad=False)
        self._flat: list[torch.Tensor] = []
        self._allocate([*self._parameters, self._has_gradient])

    @torch.no_grad()
    def collect(self) -> list[torch.Tensor]:
        """Give the sums the values of the parameters' gradients, of which None counts as zeros; return the sums."""
        gradients = [parameter.grad for parameter in self._parameters]
        *sums, _ = self._sums
        if empty := [total for total, gradient in zip(sums, gradients, strict=True) if gradient is None]:
            torch._foreach_zero_(empty)
        self._foreach(torch._foreach_copy_, gradients)
        return sums

    @torch.no_grad()
    def add(self) -> None:
        """Add the parameters' gradients to the sums, which become their gradients; None stays None."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._foreach(torch._foreach_add_, gradients)
        for parameter, total, gradient in zip(self._parameters, self._sums, gradients, strict=False):
            parameter.grad = None if gradient is None else total

    def _foreach(self, function: Callable[..., object], gradients: Sequence[torch.Tensor | None]) -> None:
        """Call a function of the sums and of gradients, without those that are None or the sums themselves."""
        pairs = [(a, b) for a, b in zip(self._sums, gradients, strict=False) if b is not None and b is not a]
        if pairs:
            function(*map(list, zip(*pairs, strict=True)))

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Set each gradient to its sum over ranks. None counts as zeros, and stays None if it is None on all ranks.

        The sums are valid until the next call.
        """
        missing = [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]
        sums, ranks = self.collect(), self._sums[-1]
        ranks.copy_(self._has_gradient)
        if missing:
            ranks[missing] = 0  # the host waits for the device
        for flat in self._flat:
            self._worker.all_reduce(flat)
        for parameter, gradient in zip(self._parameters, sums, strict=True):
            parameter.grad = gradient
        for index in missing:
            if not ranks[index]:  # a device's value: the host waits for it only where a gradient is None
                self._parameters[index].grad = None

    def _allocate(self, like: list[torch.Tensor]) -> None:
        """Make room for sums of tensors of these shapes, strides, dtypes and devices."""
        self._sums = [torch.empty(0)] * len(like)
        for dtype in dict.fromkeys(tensor.dtype for tensor in like):
            here = [index for index, tensor in enumerate(like) if tensor.dtype == dtype]
            sizes = [-(-like[index].numel() // _ALIGNMENT) * _ALIGNMENT for index in here]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=like[here[0]].device)
            for index, part in zip(here, flat.split(sizes), strict=True):
                dense = torch.empty_like(like[index], device="meta")  # keeps the strides of dense tensors only
                part = part[: like[index].numel()]
                self._sums[index] = part.as_strided(dense.shape, dense.stride(), part.storage_offset())
            self._flat.append(flat)
