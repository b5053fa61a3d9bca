"""Who this worker is, and how it speaks with the others."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydali.train.checkpoints import packed, with_tensors

HIGHEST_PRIORITY = -5
"""Of a CUDA stream; a GPU that has fewer takes its highest."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One of the processes that train together.

    The default process group is gloo's, on the host: small facts travel without touching the GPU. Gradients travel
    in `gradients`: NCCL's on GPUs; on CPUs it is None, the default group.
    """

    rank: int
    world_size: int
    device: torch.device
    cpus: int
    """CPU cores granted to this worker: threads of the loader."""
    node: str
    gradients: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: torch.device, *, cpus: int, node: str, timeout: timedelta | None = None) -> "Worker":
        """The worker that the default process group, if there is one, says this process is.

        On a GPU this thread works on a stream of its own from now on: what can be captured, and what no thread that
        uses the default stream holds up. Its kernels and NCCL's go before the loader's.

        Args:
            timeout: for which NCCL waits for another rank; None: as long as it does by itself, 10 minutes.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGHEST_PRIORITY))
        if not dist.is_initialized():
            return cls(rank=0, world_size=1, device=device, cpus=cpus, node=node)
        gradients: Any = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            gradients = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank=rank, world_size=world_size, device=device, cpus=cpus, node=node, gradients=gradients)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on rank 0; elsewhere an empty list. All ranks must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values or None)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. All ranks must call it."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def state_from_first(self, state: Any) -> Any:
        """Rank 0's nested state of tensors on the CPU and plain values, on every rank. All ranks must call it.

        Tensors are sent one by one: no rank holds more than its own copy. Nothing that is sent is executed.
        """
        if self.world_size == 1:
            return state
        shapes = packed(with_tensors(state, lambda tensor: tensor.to("meta"))) if self.rank == 0 else b""
        length = torch.tensor(len(shapes))
        dist.broadcast(length, 0)
        sent = torch.frombuffer(bytearray(shapes) or bytearray(int(length)), dtype=torch.uint8)
        dist.broadcast(sent, 0)
        if self.rank:
            state = torch.load(BytesIO(sent.numpy().tobytes()), weights_only=True)

        def broadcast(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.contiguous() if self.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
            if whole.numel():
                dist.broadcast(whole.reshape(-1).view(torch.uint8), 0)
            return whole

        return with_tensors(state, broadcast)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. All ranks must call it."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def sum_later(self, count: int) -> Callable[[], int]:
        """Begin to add up a number over all ranks, and go on; what is returned waits for the sum. All ranks must call
        both."""
        if self.world_size == 1:
            return lambda: count
        total = torch.tensor(count)
        work: Any = dist.all_reduce(total, async_op=True)

        def result() -> int:
            work.wait()
            return int(total)

        return result

    def barrier(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a small tensor, on the CPU."""
        total = tensor.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def parallel(self, model: nn.Module) -> DistributedDataParallel | None:
        """The model with gradients averaged over ranks, its buffers each rank's own; None where there is one rank."""
        if self.world_size == 1:
            return None
        parameters = inspect.signature(DistributedDataParallel).parameters
        # torch 2.15 renamed the option.
        options: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False
        }
        return DistributedDataParallel(model, process_group=self.gradients, gradient_as_bucket_view=True, **options)
