"""Bytes and nested states that the ranks of the default process group send to each other.

Nothing is sent as a pickle: otherwise anybody who can connect to the port of a process group could run any code.
"""

from collections.abc import Sequence
from io import BytesIO

import torch
import torch.distributed as dist

from raydali.train.checkpoint_file import State, map_tensors, serialize


def all_gather(content: bytes) -> list[bytes]:
    """Return the bytes of all ranks, ordered by rank."""
    mine, sizes = _padded(content)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    return _cut(parts, sizes)


def gather(content: bytes) -> list[bytes]:
    """Return the bytes of all ranks, ordered by rank, on rank 0; others get an empty list."""
    mine, sizes = _padded(content)
    parts = [torch.empty_like(mine) for _ in sizes] if dist.get_rank() == 0 else []
    dist.gather(mine, parts or None, group_dst=0)
    return _cut(parts, sizes)


def broadcast(content: bytes) -> bytes:
    """Return the bytes of rank 0; those of other ranks are ignored."""
    size = torch.tensor(len(content), device=_device())
    dist.broadcast(size, group_src=0)
    sent = _tensor(content if dist.get_rank() == 0 else bytes(int(size)))
    dist.broadcast(sent, group_src=0)
    return _cut([sent], [int(size)])[0]


def broadcast_state(state: State) -> State:
    """Return the nested state of rank 0, of tensors on the CPU and plain values; those of other ranks are ignored.

    Tensors are sent one by one, so that no rank needs memory for more than its own copy. Dense ones keep their
    strides: fused optimizers refuse momenta whose strides differ from those of the weights.
    """
    is_first = dist.get_rank() == 0
    mine = bytes(serialize(map_tensors(state, lambda tensor: tensor.to("meta")))) if is_first else b""
    shapes = broadcast(mine)
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


def _device() -> torch.device:
    """Return the device of tensors that the default group accepts: outside a job it may be one of NCCL."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _padded(content: bytes) -> tuple[torch.Tensor, list[int]]:
    """Pad the bytes to the largest size of all ranks; return them and the sizes of all ranks."""
    size = torch.tensor([len(content)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    of_ranks = [int(each) for each in sizes]
    return _tensor(content.ljust(max(of_ranks), b"\0")), of_ranks


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).to(_device())


def _cut(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[bytes]:
    """Return the bytes of each rank without padding."""
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=False)]
