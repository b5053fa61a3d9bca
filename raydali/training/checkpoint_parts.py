"""The parts of a sharded checkpoint: each rank writes its shards, and PyTorch's planner says who reads what of them.

    state.pt             the state with a mark, ("sharded", number), in the place of each sharded tensor; and the chunks
    part_00001.pt        the shards of a rank, by number

PyTorch's own files of a checkpoint have pickles, which could run code. So only the planner of DCP
(torch.distributed.checkpoint) is used: its plan is exact for any other number of ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from raydali.training.checkpoint_file import State, is_sharded, local, map_tensors, verified
from raydali.training.optim import load_optimizer

Parts = Mapping[str, Mapping[str, Any]]
"""What `described` returns for each file, and its "chunks", by number: offsets, sizes and dtype, such as "float32"."""
Read = Callable[[str], Mapping[str, torch.Tensor]]
"""Returns the shards in a file, by number."""
_MARK = "sharded"


def split(state: State) -> tuple[State, dict[str, torch.Tensor]]:
    """Return a nested state with marks in place of its sharded tensors, and these by number, the same on all ranks."""
    shards: dict[str, torch.Tensor] = {}

    def cut(tensor: torch.Tensor) -> Any:  # noqa: ANN401 (a mark or a tensor)
        if not is_sharded(tensor):
            return tensor
        shards[number := str(len(shards))] = tensor
        return _MARK, number

    return map_tensors(state, cut), shards


def chunks_of(shards: Mapping[str, torch.Tensor]) -> dict[str, tuple[list[int], list[int], str]]:
    """Return the chunk of this rank of each sharded tensor, if it is not empty."""
    return {
        number: ([*chunk.offsets], [*chunk.sizes], str(tensor.dtype).removeprefix("torch."))
        for number, tensor in shards.items()
        for chunk in _chunks(tensor)
        if 0 not in chunk.sizes
    }


def assembled(checkpoint: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return a sharded checkpoint with whole tensors, on the CPU, in place of its marks.

    Args:
        checkpoint: what `load_verified` returned.
        read: returns the contents of a file of the checkpoint, by name.

    Raises:
        BadCheckpointError: a file is not what was written.
    """
    parts, whole = checkpoint["parts"], dict[str, torch.Tensor]()

    def made(value: State) -> State:
        if _is_mark(value):
            facts = _saved(value[1], parts)[0]
            return whole.setdefault(value[1], torch.empty(facts.size, dtype=facts.properties.dtype))
        if isinstance(value, Mapping):
            return {key: made(item) for key, item in value.items()}
        return type(value)(map(made, value)) if isinstance(value, list | tuple) else value

    state = made(checkpoint["state"])
    _load(whole, parts, lambda file: verified(file, read(file), parts[file]))
    return {**checkpoint, "state": state}


def load_sharded(part: nn.Module | Optimizer, saved: State, parts: Parts, read: Read) -> None:
    """Load a module or an optimizer whose tensors are sharded, from a sharded state or from a whole one.

    Args:
        part: the module, or the optimizer of sharded parameters.
        saved: its state dict in the checkpoint, with whole tensors or marks.
        parts: the parts of the checkpoint; none if nothing in it is sharded.
        read: reads a file.
    """
    targets: dict[str, torch.Tensor] = {}

    def placed(value: State, like: torch.Tensor) -> State:
        if _is_mark(value):
            return targets.setdefault(value[1], torch.zeros_like(like))
        if not is_sharded(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    if isinstance(part, Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        of_parameters = {
            index: {name: placed(value, parameters[index]) for name, value in state.items()}
            for index, state in saved["state"].items()
        }
        _load(targets, parts, read)
        load_optimizer(part, {**saved, "state": of_parameters})
    else:
        now = part.state_dict()
        state = {name: placed(value, now[name]) for name, value in saved.items()}
        _load(targets, parts, read)
        part.load_state_dict(state)


def _is_mark(value: State) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == _MARK


def _chunks(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """Return which part of a tensor this rank has: all of one that is not sharded."""
    if is_sharded(tensor):
        return list(cast(Any, tensor).__create_chunk_list__())
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]


def _saved(number: str, parts: Parts) -> tuple[TensorStorageMetadata, dict[torch.Size, str]]:
    """Describe a tensor, and say in which file the chunk at each offset is."""
    chunks = {file: part["chunks"][number] for file, part in parts.items() if number in part["chunks"]}
    every = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in chunks.values()]
    ends = (map(sum, zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in every)
    dtype = getattr(torch, next(iter(chunks.values()))[2])
    facts = TensorStorageMetadata(TensorProperties(dtype), torch.Size(map(max, zip(*ends, strict=True))), every)
    return facts, {chunk.offsets: file for chunk, file in zip(every, chunks, strict=True)}


def _load(targets: Mapping[str, torch.Tensor], parts: Parts, read: Read) -> None:
    """Fill tensors, of sharded ones this rank's part, and read each file that has some of it once."""
    by_file: dict[str, list[Any]] = {}
    for number, target in targets.items():
        facts, files = _saved(number, parts)
        for item in create_read_items_for_chunk_list(number, facts, _chunks(target)):
            by_file.setdefault(files[item.storage_index.offset or torch.Size()], []).append((item, local(target)))
    for file, items in by_file.items():
        shards = read(file)
        for item, target in items:
            source = shards[item.storage_index.fqn]
            for dim, length in enumerate(item.lengths):
                source = source.narrow(dim, item.storage_offsets[dim], length)
                target = target.narrow(dim, item.dest_offsets[dim], length)
            target.detach().copy_(source)
