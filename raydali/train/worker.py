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

from raydali.host.hardware import OVERLAP_PAYS
from raydali.train import byte_collectives
from raydali.train.checkpoint_file import State
from raydali.train.membership import Groups, Membership, RankLostError
from raydali.train.step_counts import StepCounts

HIGHEST_PRIORITY = -5
"""Priority of a CUDA stream; a GPU with fewer priorities uses its highest."""
T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Worker:
    """One of the processes that train together.

    The default process group uses gloo, on the host: it sends small values without use of the GPU. The process group
    `gradients` all-reduces gradients. On GPUs it uses NCCL; on CPUs it is None, which means `group`.

    Where ranks can be replaced in place, `membership` knows of it, and calls raise RankLostError. `regroup` then
    changes rank and world size. A replacement is alone until it has joined: calls return at once.
    """

    rank: int
    world_size: int
    device: torch.device
    cpus: int
    """Number of CPU cores of this worker, which is the number of the loader's threads."""
    node: str
    gradients: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    """The group of all values but gradients; None: the default group."""
    membership: Membership | None = None
    joined: bool = True
    """True if this process is one of the group; otherwise it prepares to replace a lost rank."""
    counts: StepCounts = field(default_factory=StepCounts)
    before_call: Callable[[], None] = lambda: None
    """Called before each call but `all_reduce`, for which all ranks must have finished the same step."""
    after_loss: Callable[[], bool] = lambda: False
    """Called if ranks were lost in such a call; it returns whether lost ranks are replaced, so that it can be done."""
    done_calls: list[Callable[[], object]] = field(default_factory=list)
    """Such calls since the last step: a rank that replaces a lost one does them with the others again."""

    @property
    def share(self) -> int:
        """The number of this rank's share of the data: its rank at the beginning."""
        return self.rank if self.membership is None else self.membership.rank

    @property
    def overlap_pays(self) -> bool:
        """True if gradients are summed faster during the backward pass, and no rank can be lost: see gradients.py."""
        return self.membership is None and self.device.type in OVERLAP_PAYS

    @property
    def _is_alone(self) -> bool:
        return self.world_size == 1 or not self.joined

    @classmethod
    def join(
        cls, device: torch.device, *, cpus: int, node: str, timeout: timedelta | None = None, gradients: bool = True
    ) -> "Worker":
        """Return this process as a worker of the default process group, or as the only one if there is no group.

        On a GPU this thread uses a non-default stream from now on. This stream can be captured, and is not serialised
        with the default-stream work of other threads. Its kernels and those of NCCL have priority over the loader's.

        Args:
            device: the device of this rank.
            cpus: number of cores that this rank may use.
            node: the name of its node.
            timeout: NCCL's timeout for waiting for another rank; None for its default of 10 minutes.
            gradients: whether to make a group of all ranks for gradients; otherwise `as_member` is next.
        """
        _use(device)
        if not dist.is_initialized():
            return cls(rank=0, world_size=1, device=device, cpus=cpus, node=node)
        group: Any = None
        if gradients and device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            group = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank=rank, world_size=world_size, device=device, cpus=cpus, node=node, gradients=group)

    @classmethod
    def replace(cls, device: torch.device, membership: Membership, *, cpus: int, node: str) -> "Worker":
        """Return this process as a worker that prepares to replace a lost one.

        Its rank is the last one from the beginning, as it will be: it never writes for all ranks.
        """
        _use(device)
        size = membership.world_size
        return cls(
            rank=size - 1, world_size=size, device=device, cpus=cpus, node=node, membership=membership, joined=False
        )

    def as_member(self, membership: Membership, timeout: timedelta) -> "Worker":
        """Return this worker of the default process group as one of those that train, or as a spare.

        All ranks of the default group must call it. Those from the membership's world size on are spares.
        """
        ranks = [*range(membership.world_size)]
        group: Any = dist.new_group(ranks, timeout) if len(ranks) < self.world_size else None
        if membership.joins:
            return Worker.replace(self.device, membership, cpus=self.cpus, node=self.node)
        self.world_size, self.group, self.membership = len(ranks), group, membership
        self.gradients = membership.first_gradients()
        return self

    def regroup(self, rank: int, world_size: int, groups: Groups) -> None:
        """Go on in groups of other ranks, which have another numbering."""
        self.rank, self.world_size, self.joined = rank, world_size, True
        self.group, self.gradients = groups

    def _call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that needs all ranks, at the same step.

        It may be called again, and must not change its inputs.

        Raises:
            RankLostError: ranks were lost, and are not replaced now.
        """
        self.before_call()
        while True:
            try:
                result = self.guarded(function)
            except RankLostError:
                if not self.after_loss():
                    raise
            else:
                if self.membership is not None:
                    self.done_calls.append(function)
                return result

    def guarded(self, function: Callable[[], T], *, waits: bool = True) -> T:
        """Return what a function returns that needs all ranks.

        Args:
            function: the function.
            waits: whether the GPU has done it then, if ranks can be lost.

        Raises:
            RankLostError: ranks were lost.
        """
        if self.membership is None:
            return function()
        return self.membership.call(function if self.device.type == "cpu" else _on_this_stream(function, waits))

    def gather(self, value: object) -> list[Any]:
        """Return all ranks' values, ordered by rank, on each rank that needs them. All ranks must call it.

        Rank 0 needs them, and if ranks can be replaced all do, since each may be rank 0 next. Others get an empty list.

        Args:
            value: a value that JSON can represent, or NaN or infinity. It is sent as JSON, so tuples become lists.
        """
        return [json.loads(content) for content in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Gather bytes like `gather`, for data that is large or not JSON."""
        if self._is_alone:
            return [content]

        def gathered() -> list[bytes]:
            everywhere = self.membership is not None
            return (byte_collectives.all_gather if everywhere else byte_collectives.gather)(content, self.group)

        return self._call(gathered)

    def from_first(self, value: T) -> T:
        """Return rank 0's value (see `gather`) on every rank. All ranks must call it."""
        if self._is_alone:
            unchanged: T = json.loads(json.dumps(value))
            return unchanged
        known = [json.dumps(value).encode()]
        # If this is done again, it is with the received value, whoever is the first then.
        known.append(self._call(lambda: byte_collectives.broadcast(known[-1], self.group)))
        value_of_first: T = json.loads(known[-1])
        return value_of_first

    def state_from_first(self, state: State, first: int = 0) -> State:
        """Return rank 0's nested state, see `broadcast_state`. All ranks must call it.

        Args:
            state: the state on rank 0; ignored on others.
            first: the rank that sends its state, if it is another one.
        """
        return state if self._is_alone else byte_collectives.broadcast_state(state, self.group, first)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set these tensors on the device to their values on rank 0. All ranks must call it."""
        group = self.gradients or self.group
        for each in () if self._is_alone else tensors:
            tensor = each.detach()
            self._call(lambda tensor=tensor: dist.broadcast(tensor, group=group, group_src=0))  # type: ignore[misc]

    def all_reduce(self, tensor: torch.Tensor, *, waits: bool = True) -> None:
        """Sum a tensor on the device over all ranks, in place. All ranks must call it.

        Args:
            tensor: the tensor.
            waits: whether the GPU has done it then, if ranks can be lost; otherwise `queued` follows.

        Raises:
            RankLostError: ranks were lost; the tensor may still change.
        """
        group = self.gradients or self.group
        if not self._is_alone:
            self.guarded(lambda: dist.all_reduce(tensor, group=group), waits=waits)
        elif self.membership is not None and self.joined:
            self.membership.check()

    def queued(self) -> Callable[[], None]:
        """Return a function that waits until the GPU has done what is queued now, if ranks can be lost.

        It raises RankLostError if they were lost. A replacement that has not joined has no sums to wait for.
        """
        if self.membership is None or self.device.type == "cpu" or not self.joined:
            return lambda: None
        membership, done = self.membership, torch.cuda.Event()
        done.record()
        return lambda: membership.wait_for(done.query)

    def exchange(self, value: object) -> list[Any]:
        """Return all ranks' values (see `gather`), ordered by rank, on every rank. All ranks must call it."""
        content = json.dumps(value).encode()
        of_ranks = [content] if self._is_alone else self._call(lambda: byte_collectives.all_gather(content, self.group))
        return [json.loads(each) for each in of_ranks]

    def sum_later(self, counts: torch.Tensor) -> Callable[[], None]:
        """Start to sum a tensor over all ranks, in place; return a function that waits. All ranks must call both."""
        work: Any = None if self._is_alone else dist.all_reduce(counts, group=self.group, async_op=True)
        return lambda: work and work.wait()

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if not self._is_alone:
            self._call(lambda: dist.barrier(group=self.group))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a small tensor, on the CPU."""
        mine = tensor.detach().cpu().clone()

        def summed() -> torch.Tensor:
            total = mine.clone()
            dist.all_reduce(total, group=self.group)
            return total

        return mine if self._is_alone else self._call(summed)

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


def _use(device: torch.device) -> None:
    """Use a GPU, and a stream of high priority on it, in this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=HIGHEST_PRIORITY))


def _on_this_stream(function: Callable[[], T], waits: bool) -> Callable[[], T]:
    """Return a function that does the same in any thread on this thread's stream, and may wait for the GPU."""
    stream = torch.cuda.current_stream()

    def done() -> T:
        with torch.cuda.stream(stream):
            result = function()
        if waits:
            stream.synchronize()
        return result

    return done
