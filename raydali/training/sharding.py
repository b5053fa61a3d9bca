"""Networks that are larger than a GPU: PyTorch's FSDP2 shards weights, gradients and momenta over the workers.

    a block's shards --all-gather--> the whole block: forward and backward pass --reduce-scatter--> shards of gradients

A block is gathered while the one before it computes, and its memory is free again after its pass. FSDP2 takes half a
second to import, so this file is imported only where something is sharded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raydali.errors import UsageError
from raydali.training.blocks import repeated_blocks
from raydali.training.checkpoint_file import is_sharded
from raydali.training.worker import Worker


class Sharding:
    """Shards networks over all workers, or over groups of them whose copies are equal. All ranks must call the same.

    Between the micro-batches of a step, weights stay whole and gradients are summed on each rank, so that each step
    gathers once. Otherwise ranks with different numbers of micro-batches would wait for each other, too.

    Args:
        worker: this rank.
        shards: the number of workers of a group, which divides their number.
        dtype: of forward and backward pass. In 16 bits, weights are gathered in it, and gradients summed in float32.
        several: whether a step has more micro-batches than there are workers.
        timeout: of process groups; None for PyTorch's own.

    Attributes:
        shards: see the argument: so many workers have a copy together.
        rank: this rank's number among them.
        writes: whether it writes its shards to checkpoints: of equal copies, the first is written.
        beside: the worker with a group for threads that write checkpoints.
        functions: how many functions compute gradients of its networks.
    """

    def __init__(
        self, worker: Worker, shards: int, dtype: torch.dtype, *, several: bool, timeout: timedelta | None = None
    ) -> None:
        self._worker, self._dtype, self._frees = worker, dtype, not several
        self.shards, self.rank, self.writes = shards, worker.rank % shards, worker.rank < shards
        self._mesh = _mesh(worker, shards, timeout)
        self._roots: list[nn.Module] = []
        self.beside, self.functions = worker.beside(timeout), 0

    @torch.no_grad()
    def shard(self, model: nn.Module, blocks_of: Callable[[nn.Module], Iterable[nn.Module]] = repeated_blocks) -> bool:
        """Move a network from the host to the device, block by block, and shard it; its values are those of rank 0.

        Returns:
            Whether there are blocks; otherwise the whole network is gathered at once.

        Raises:
            UsageError: a parameter is a scalar, which has no rows.
        """
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise UsageError(f"--shard cannot shard {name}, a scalar: give it the shape (1,), or leave --shard out")
        blocks = [*blocks_of(model)]
        # BatchNorm computes with weights in float32 only.
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        casts = self._dtype.itemsize == 2 and not norms
        policy = MixedPrecisionPolicy(self._dtype, torch.float32) if casts else MixedPrecisionPolicy()
        for unit in (*blocks, model):
            for parameter in unit.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(self._worker.device).contiguous()
                    self._worker.broadcast([parameter])
            # The root's weights are needed again at once in the backward pass.
            frees = self._frees and unit is not model
            fully_shard(unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=frees)
        self._worker.broadcast(model.buffers())
        self._roots.append(model)
        return bool(blocks)

    def begin(self, model: nn.Module, *, last: bool) -> None:
        """Prepare for the forward and backward pass of a micro-batch; gradients are summed after the last of a step."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)

    def on_first(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state dict with whole tensors on the host of rank 0, gathered one by one; other ranks' is empty.

        Until the device has done what it was given, they are incomplete.
        """
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            gathered = tensor.full_tensor() if is_sharded(tensor) else tensor
            if self._worker.rank == 0:
                on_host = torch.empty_like(gathered, device="cpu", pin_memory=gathered.is_cuda)
                whole[name] = on_host.copy_(gathered, non_blocking=True)
        return whole

    def units(self, model: nn.Module) -> list[Any]:
        """Return the parts that are gathered one by one: its blocks, after the model itself, which has the rest."""
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all networks inside this context: ranks may call them differently often, without gradients."""
        for root in self._roots:
            fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]  # as the first forward pass does
            for unit in self.units(root):
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
        try:
            yield
        finally:
            for root in self._roots:
                for unit in self.units(root):
                    unit.reshard()
                    unit.set_reshard_after_forward(self._frees and unit is not root, recurse=False)


def _mesh(worker: Worker, size: int, timeout: timedelta | None) -> DeviceMesh:
    kind = worker.device.type
    if size == worker.world_size:
        return DeviceMesh.from_group(worker.gradients or dist.distributed_c10d._get_default_group(), kind)
    ranks = torch.arange(worker.world_size).view(-1, size)
    options: dict[str, Any] = {"backend": "nccl" if kind == "cuda" else "gloo", "timeout": timeout}
    groups: Any = [
        dist.new_subgroups_by_enumeration(enumerated.tolist(), **options)[0] for enumerated in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("copy", "shard"))
