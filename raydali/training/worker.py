"""A worker's identity, and its communication with the other workers.

Nothing is sent as a pickle: otherwise anybody who can connect to the port of a process group could run any code.
"""

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from io import BytesIO
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydali.training.checkpoint_file import State, map_tensors, serialize

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
        self._work: Any = None

    def begin_step(self, world_size: int) -> None:
        """Begin to sum the counts. All ranks must call it, and `end_step`."""
        self._summed = torch.tensor([*self.mine.values()])
        self._work = dist.all_reduce(self._summed, async_op=True) if world_size > 1 else None

    def end_step(self) -> None:
        """Wait for the sums that `begin_step` has begun."""
        if self._work is not None:
            self._work.wait()
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
    host: dist.ProcessGroup | None = None
    """The group of small values; None: the default group."""
    counts: StepCounts = field(default_factory=StepCounts)

    @classmethod
    def join(cls, device: torch.device, *, cpus: int, node: str, timeout: timedelta | None = None) -> "Worker":
        """Return this process as a worker of the default process group, or as the only one if there is no group.

        On a GPU this thread uses a non-default stream from now on. This stream can be captured, and is not serialised
        with the default-stream work of other threads. Its kernels and NCCL's have priority over the loader's.

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

    def beside(self, timeout: timedelta | None) -> "Worker":
        """Return this worker with a group of its own, for `gather` and `exchange` of a thread beside the steps."""
        group: Any = dist.new_group(backend="gloo", timeout=timeout)
        return replace(self, host=group)

    def gather(self, value: object) -> list[Any]:
        """Return all ranks' values, ordered by rank, on rank 0; others get an empty list. All ranks must call it.

        Args:
            value: a value that JSON can represent, or NaN or infinity. It is sent as JSON, so tuples become lists.
        """
        return [json.loads(content) for content in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Gather bytes like `gather`, for data that is large or not JSON."""
        return self._gathered(content, on_all=False)

    def exchange(self, value: object) -> list[Any]:
        """Return all ranks' values (see `gather`), ordered by rank, on every rank. All ranks must call it."""
        return [json.loads(content) for content in self._gathered(json.dumps(value).encode(), on_all=True)]

    def _gathered(self, content: bytes, *, on_all: bool) -> list[bytes]:
        if self.world_size == 1:
            return [content]
        mine, sizes = _padded(content, self.host)
        parts = [torch.empty_like(mine) for _ in sizes] if on_all or self.rank == 0 else []
        if on_all:
            dist.all_gather(parts, mine, self.host)
        else:
            dist.gather(mine, parts or None, group_dst=0, group=self.host)
        return [_bytes(part, size) for part, size in zip(parts, sizes, strict=False)]

    def from_first(self, value: T) -> T:
        """Return rank 0's value (see `gather`) on every rank. All ranks must call it."""
        value_of_first: T = json.loads(self._broadcast_bytes(json.dumps(value).encode()))
        return value_of_first

    def _broadcast_bytes(self, content: bytes) -> bytes:
        """Return the bytes of rank 0; other ranks' are ignored."""
        if self.world_size == 1:
            return content
        size = torch.tensor(len(content), device=_device())
        dist.broadcast(size, group_src=0)
        sent = _tensor(content if self.rank == 0 else bytes(int(size)))
        dist.broadcast(sent, group_src=0)
        return _bytes(sent, int(size))

    def state_from_first(self, state: State) -> State:
        """Return rank 0's nested state, of tensors on the CPU and plain values; ignored on others. All must call it.

        Tensors are sent one by one, so that no rank needs memory for more than its own copy. Dense ones keep their
        strides: fused optimizers refuse momenta whose strides are not the weights'.
        """
        if self.world_size == 1:
            return state
        is_first = self.rank == 0
        mine = bytes(serialize(map_tensors(state, lambda tensor: tensor.to("meta")))) if is_first else b""
        shapes = self._broadcast_bytes(mine)
        if not is_first:
            state = torch.load(BytesIO(shapes), weights_only=True)

        def received(tensor: torch.Tensor) -> torch.Tensor:
            whole = torch.empty_like(tensor, device="cpu")
            if is_first:
                whole = tensor if tensor.stride() == whole.stride() else whole.copy_(tensor)
            if whole.numel():
                memory = whole.as_strided((whole.numel(),), (1,))
                dist.broadcast(memory.view(torch.uint8), group_src=0)
            return whole

        return map_tensors(state, received)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set these tensors on the device to their values on rank 0. All ranks must call it."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(tensor.detach(), group=self.gradients, group_src=0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor on the device over all ranks, in place. All ranks must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.gradients)

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


def _device() -> torch.device:
    """Return the device of tensors that the default group accepts: outside a job it may be one of NCCL."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _padded(content: bytes, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """Pad the bytes to the largest size of all ranks; return them and the sizes of all ranks."""
    size = torch.tensor([len(content)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group)
    of_ranks = [int(size_of_rank) for size_of_rank in sizes]
    return _tensor(content.ljust(max(of_ranks), b"\0")), of_ranks


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(_device())


def _bytes(tensor: torch.Tensor, size: int) -> bytes:
    """Return the bytes of a tensor without padding."""
    return tensor[:size].cpu().numpy().tobytes()
