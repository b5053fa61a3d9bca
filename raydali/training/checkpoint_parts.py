"""The parts of a sharded checkpoint: each rank writes its rows of sharded tensors, and reads those that it needs.

    state.pt             the state with a mark, ("sharded", shape, dtype), in the place of each sharded tensor
    part_00001.pt        the rows of a rank, in the order of marks

FSDP2 shards rows as torch.chunk does. So the number of parts says which rows each of them has, and any other number of
ranks can read them. PyTorch's own files of such a checkpoint have pickles, which could run code.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raydali.training.checkpoint_file import State, is_sharded, local, map_tensors, rows_of, verified

_MARK = "sharded"


def split(state: State) -> tuple[State, list[torch.Tensor]]:
    """Return a nested state with marks in place of its sharded tensors, and this rank's rows of these."""
    rows: list[torch.Tensor] = []

    def cut(tensor: torch.Tensor) -> Any:  # noqa: ANN401 (a mark or a tensor)
        if not is_sharded(tensor):
            return tensor
        rows.append(local(tensor))
        return _MARK, [*tensor.shape], tensor.dtype

    return map_tensors(state, cut), rows


def assembled(
    checkpoint: Mapping[str, Any], read: Callable[[str], bytes], rank: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Return a checkpoint with tensors in place of its marks: the rows of one of so many ranks; by default all rows.

    Args:
        checkpoint: what `load_verified` returned.
        read: returns the contents of a part by name; those that have none of the rows are not read.
        rank: the number of a rank among those that will have the rows together.
        ranks: their number.

    Raises:
        BadCheckpointError: a part is not what was written.
    """
    parts, targets = checkpoint["parts"], list[tuple[torch.Tensor, int, int]]()

    def empty(mark: State) -> torch.Tensor:
        _, (length, *columns), dtype = mark
        mine = rows_of(length, rank, ranks)
        targets.append((torch.empty(len(mine), *columns, dtype=dtype), mine.start, length))
        return targets[-1][0]

    state = map_tensors(checkpoint["state"], empty, _is_mark)
    for part, (file, facts) in enumerate(parts.items()):
        saved: list[torch.Tensor] = []
        for number, (target, first, length) in enumerate(targets):
            its = rows_of(length, part, len(parts))
            begin, end = max(first, its.start), min(first + len(target), its.stop)
            if begin < end:
                saved = saved or verified(file, read(file), facts)
                target[begin - first : end - first] = saved[number][begin - its.start : end - its.start]
    return {**checkpoint, "state": state}


def _is_mark(value: State) -> bool:
    return isinstance(value, tuple) and value[:1] == (_MARK,)
