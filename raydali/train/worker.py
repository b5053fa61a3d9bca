"""A worker's identity, and its communication with the other workers."""

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydali.train import byte_collectives
from raydali.train.checkpoint_file import State

HIGHEST_PRIORITY = -5
"""Priority of a CUDA stream; a GPU with fewer priorities uses its highest."""
NOTICES, BROKEN = "notices", "broken"
T = TypeVar("T")


class StepCounts:
    """Counts of one rank, whose sums over all ranks are known one step later.

    So all ranks decide alike at the same step, and none waits for another one: the sum runs beside the step.

    Attributes:
        mine: this rank's counts by name, which their owners set between two steps.
        sums: the sums over all ranks of what they had at the beginning of the newest step.
    """

    def __init__(self) -> None:
        self.mine = {NOTICES: 0, BROKEN: 0}
        self.sums = {NOTICES: 0, BROKEN: 0}
        self._summed = torch.zeros(0)
        self._wait: Callable[[], None] = lambda: None

    def begin_step(self, sum_later: Callable[[torch.Tensor], Callable[[], None]]) -> None:
        """Begin to sum the counts with `Worker.sum_later`."""
        self._summed = torch.tensor([*self.mine.values()])
        self._wait = sum_later(self._summed)

    def end_step(self) -> None:
        """Wait for the sums that `begin_step` has begun."""
        self._wait()
        self.sums = dict(zip(self.sums, self._summed.tolist(), strict=True))


@dataclass(kw_only=True, eq=False)
class Worker:
    """One of the processes that train together.

    The default process group uses gloo, on the host: it sends small values without use of the GPU. The process group
    `gradients` all-reduces gradients. On GPUs it uses NCCL; on CPUs it is None, which means the default group.
    """

    rank: int
    world_size: int
    device: torch.device
    cpus: int
    """Number of CPU cores of this worker, which is the number of the loader's threads."""
    node: str
    gradients: dist.ProcessGroup | None = None
    counts: StepCounts = field(default_factory=StepCounts)

    @classmethod
    def join(cls, device: torch.device, *, cpus: int, node: str, timeout: timedelta | None = None) -> "Worker":
        """Return this process as a worker of the default process group, or as the only one if there is no group.

        On a GPU this thread uses a non-default stream from now on. This stream can be captured, and is not serialised
        with the default-stream work of other threads. Its kernels and those of NCCL have priority over the loader's.

        Args:
            device: the device of this rank.
            cpus: number of cores that this rank may use.
            node: the name of its node.
            timeout: NCCL's timeout for waiting for another rank; None for its default of 10 minutes.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGHEST_PRIORITY))
        if not dist.is_initialized():
            return cls(rank=0, world_size=1, device=device, cpus=cpus, node=node)
        group: Any = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            group = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank=rank, world_size=world_size, device=device, cpus=cpus, node=node, gradients=group)

    def gather(self, value: object) -> list[Any]:
        """Return all ranks' values, ordered by rank, on rank 0; others get an empty list. All ranks must call it.

        Args:
            value: a value that JSON can represent, or NaN or infinity. It is sent as JSON, so tuples become lists.
        """
        return [json.loads(content) for content in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Gather bytes like `gather`, for data that is large or not JSON."""
        return [content] if self.world_size == 1 else byte_collectives.gather(content)

    def exchange(self, value: object) -> list[Any]:
        """Return all ranks' values (see `gather`), ordered by rank, on every rank. All ranks must call it."""
        content = json.dumps(value).encode()
        of_ranks = [content] if self.world_size == 1 else byte_collectives.all_gather(content)
        return [json.loads(each) for each in of_ranks]

    def from_first(self, value: T) -> T:
        """Return rank 0's value (see `gather`) on every rank. All ranks must call it."""
        content = json.dumps(value).encode()
        value_of_first: T = json.loads(content if self.world_size == 1 else byte_collectives.broadcast(content))
        return value_of_first

    def state_from_first(self, state: State) -> State:
        """Return rank 0's nested state, see `broadcast_state`; ignored on others. All ranks must call it."""
        return state if self.world_size == 1 else byte_collectives.broadcast_state(state)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set these tensors on the device to their values on rank 0. All ranks must call it."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(tensor.detach(), group=self.gradients, group_src=0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor on the device over all ranks, in place. All ranks must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.gradients)

    def sum_later(self, counts: torch.Tensor) -> Callable[[], None]:
        """Start to sum a tensor over all ranks, in place; return a function that waits. All ranks must call both."""
        work: Any = dist.all_reduce(counts, async_op=True) if self.world_size > 1 else None
        return lambda: work and work.wait()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a small tensor, on the CPU."""
        total = tensor.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if self.world_size > 1:
            dist.barrier()

    def parallel(self, model: nn.Module) -> DistributedDataParallel | None:
        """Return the model in DDP, which averages gradients but does not synchronise buffers; None for one rank."""
        if self.world_size == 1:
            return None
        parameters = inspect.signature(DistributedDataParallel).parameters
        # torch 2.15 renamed the option.
        options: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False
        }
        return DistributedDataParallel(model, process_group=self.gradients, gradient_as_bucket_view=True, **options)
