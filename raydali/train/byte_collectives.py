"""Bytes and nested states that the ranks of a process group send to each other.

Nothing is sent as a pickle: otherwise anybody who can connect to the port of a process group could run any code.
"""

from collections.abc import Sequence
from io import BytesIO

import torch
import torch.distributed as dist

from raydali.train.checkpoint_file import State, map_tensors, serialize

Group = dist.ProcessGroup | None
"""None is the default group."""


def all_gather(content: bytes, group: Group) -> list[bytes]:
    """Return the bytes of all ranks, ordered by rank."""
    mine, sizes = _padded(content, group)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return _cut(parts, sizes)


def gather(content: bytes, group: Group) -> list[bytes]:
    """Return the bytes of all ranks, ordered by rank, on rank 0; others get an empty list."""
    mine, sizes = _padded(content, group)
    parts = [torch.empty_like(mine) for _ in sizes] if _known(group).rank() == 0 else []
    dist.gather(mine, parts or None, group=group, group_dst=0)
    return _cut(parts, sizes)


def broadcast(content: bytes, group: Group, source: int = 0) -> bytes:
    """Return the bytes of one rank; those of other ranks are ignored."""
    size = torch.tensor(len(content), device=_device(group))
    dist.broadcast(size, group=group, group_src=source)
    sent = _tensor(content if _known(group).rank() == source else bytes(int(size)), group)
    dist.broadcast(sent, group=group, group_src=source)
    return _cut([sent], [int(size)])[0]


def broadcast_state(state: State, group: Group, source: int) -> State:
    """Return the nested state of one rank, of tensors on the CPU and plain values; those of other ranks are ignored.

    Tensors are sent one by one, so that no rank needs memory for more than its own copy. Dense ones keep their
    strides: fused optimizers refuse momenta whose strides differ from those of the weights.
    """
    is_source = _known(group).rank() == source
    mine = bytes(serialize(map_tensors(state, lambda tensor: tensor.to("meta")))) if is_source else b""
    shapes = broadcast(mine, group, source)
    if not is_source:
        state = torch.load(BytesIO(shapes), weights_only=True)

    def received(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.empty_like(tensor, device="cpu")
        if is_source:
            whole = tensor if tensor.stride() == whole.stride() else whole.copy_(tensor)
        if whole.numel():
            memory = whole.as_strided((whole.numel(),), (1,))
            dist.broadcast(memory.view(torch.uint8), group=group, group_src=source)
        return whole

    return map_tensors(state, received)


def _known(group: Group) -> dist.ProcessGroup:
    known = group or dist.group.WORLD
    assert known is not None
    return known


def _device(group: Group) -> torch.device:
    """Return the device of tensors that the group accepts: outside a job the default group may be one of NCCL."""
    nccl = group is None and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _padded(content: bytes, group: Group) -> tuple[torch.Tensor, list[int]]:
    """Pad the bytes to the largest size of all ranks; return them and the sizes of all ranks."""
    size = torch.tensor([len(content)], device=_device(group))
    sizes = [torch.zeros_like(size) for _ in range(_known(group).size())]
    dist.all_gather(sizes, size, group=group)
    of_ranks = [int(each) for each in sizes]
    return _tensor(content.ljust(max(of_ranks), b"\0"), group), of_ranks


def _tensor(content: bytes, group: Group) -> torch.Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(_device(group))


def _cut(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[bytes]:
    """Return the bytes of each rank without padding."""
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=False)]
