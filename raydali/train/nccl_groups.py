"""NCCL's process groups for the gradients of ranks that may be lost, one after each change of ranks.

NCCL's kernels wait on the GPU for all ranks. If one is lost, they wait for ever, and what is queued behind them, too,
until the group is aborted. No member can join a group, either.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class NcclGroups:
    """The groups of one rank, of which only the newest is in use.

    Args:
        device: the GPU of this rank.
        timeout: the timeout of calls.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        self._newest: list[Any] = []
        self._aborted: list[Any] = []

    def connect(self, store: Store, rank: int, size: int) -> dist.ProcessGroup:
        """Return a new group. All its ranks must call it with a store of their own."""
        # Otherwise a broken connection to a lost rank would end this process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(self._device):
            group.eager_connect_single_device(self._device)
        self._newest.append(group)
        return group  # type: ignore[no-any-return]  # a backend has the interface of a group

    def abort(self) -> None:
        """End the newest group and its kernels."""
        while self._newest:
            self._aborted.append(self._newest.pop())  # to free it waits for threads that may wait for this one
            self._aborted[-1].abort()
