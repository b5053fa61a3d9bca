"""The contents of a checkpoint: its tensors and plain values are copied to the host, written, and loaded again.

Nothing in a file is executed when it is loaded. A manifest says which files belong to the checkpoint.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

FILE_NAME = "state.pt"
FORMATS = 1, 3
"""Of a manifest of a whole state, and of a sharded one, which earlier versions cannot read."""
_OVERHEAD = 2048
"""Bytes that suffice for the rest of a file, per tensor; otherwise more memory is allocated."""
State = Any
"""Nested mappings, lists and tuples of tensors and plain values."""


class BadCheckpointError(Exception):
    """A checkpoint that cannot be used; the message says why."""


def is_finite(state: State) -> bool:
    """Return whether all tensors of a nested state are finite. It waits for the device once."""
    # One number per tensor suffices: a NaN or an infinity makes the sum NaN or infinite.
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors_in(state):
        if tensor.is_floating_point():
            sums.setdefault(tensor.device, []).append(tensor.detach().sum().double())
    return all(bool(torch.stack(of_device).isfinite().all()) for of_device in sums.values())


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes in which the bits of tensors are exact, by their bytes."""


def tensors_in(value: State) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def map_tensors(
    value: State, change: Callable[[Any], Any], is_leaf: Callable[[State], bool] = torch.is_tensor
) -> State:
    """Apply `change` to the leaves of a nested state, by default its tensors, in order, and return the new state."""
    if is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change, is_leaf) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change, is_leaf) for item in value)
    return value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, and another tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(value: object) -> "TypeIs[DTensor]":
    """Return whether a value is a sharded tensor, without its class, which takes half a second to import."""
    return hasattr(value, "to_local")


def rows_of(length: int, rank: int, ranks: int) -> range:
    """Return which of so many rows of a sharded tensor a rank has."""
    each = -(-length // ranks)
    return range(min(rank * each, length), min((rank + 1) * each, length))


def sharded_like(like: object, rows: Any) -> Any:  # noqa: ANN401 (a tensor or a plain value)
    """Return a tensor that is sharded as another one, of all its rows or of this rank's, which are copied.

    Plain values, tensors of another shape, and rows like a tensor that is not sharded are returned as they are.
    """
    if not is_sharded(like) or not isinstance(rows, torch.Tensor) or rows.shape[1:] != like.shape[1:]:
        return rows
    mesh = like.device_mesh
    mine = rows_of(len(like), mesh.get_local_rank(mesh.ndim - 1), mesh.shape[-1])
    if rows.dim() == 0 or len(rows) not in (len(like), len(mine)):
        return rows
    if len(rows) == len(like):
        rows = rows[mine.start : mine.stop]
    rows = rows.to(like.to_local().device, copy=True)
    return like.from_local(rows, mesh, like.placements, shape=like.shape, stride=like.stride())


def snapshot(state: State) -> State:
    """Copy a nested state to the CPU, of sharded tensors this rank's parts, so that later steps do not change it.

    It waits for the device once.
    """
    copy = map_tensors(state, lambda tensor: _like(local(tensor)).copy_(local(tensor.detach()), non_blocking=True))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copy


@dataclass(frozen=True)
class Snapshot:
    """A copy of a nested state on the CPU, which is complete after `wait`."""

    state: State
    _copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the device has copied the state."""
        if self._copied is not None:
            self._copied.synchronize()


class Snapshots:
    """Snapshots of a run's state, for which no step on a GPU waits.

    A side stream copies weights and momenta to pinned memory during the next forward and backward pass; the next update
    waits on the device for the end of the copy. The buffers of modules are small, and are copied before that pass,
    which changes them. PyTorch keeps the pinned memory for the next snapshot. The device needs no further memory.

    Attributes:
        copied: the end of the newest copy, if an update must wait for it: then call `before_update`.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: torch.cuda.Event | None = None

    def take(self, state: State, modules: Iterable[nn.Module] = ()) -> Snapshot:
        """Begin to copy a nested state. Until the next call of `before_update`, only a forward pass may change it.

        Args:
            state: tensors of it that are equal views of the same memory are copied once.
            modules: the modules whose buffers a forward pass changes.
        """
        buffers = {buffer.data_ptr() for module in modules for buffer in module.buffers()}
        copies: dict[tuple[object, ...], torch.Tensor] = {}
        at_once, later = _Pairs(), _Pairs()

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if key not in copies:
                copies[key] = _like(tensor)
                (at_once if key[0] in buffers else later).append((copies[key], tensor.detach()))
            return copies[key]

        copy = map_tensors(state, on_host)
        _copy(at_once)
        if self._side is None:
            _copy(later)
            return Snapshot(copy)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            _copy(later)
        for _, tensor in later:
            if tensor.is_cuda:
                tensor.record_stream(self._side)
        self.copied = self._side.record_event(torch.cuda.Event(blocking=True))
        return Snapshot(copy, self.copied)

    def before_update(self) -> None:
        """Let the device, not the host, wait for the end of the newest copy before it continues the current stream."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _copy(pairs: _Pairs) -> None:
    if pairs:
        torch._foreach_copy_([host for host, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)


def serialize(state: State) -> memoryview:
    """Return a snapshot as the contents of a file."""
    tensors = [*tensors_in(state)]
    file = _MemoryFile(sum(tensor.nbytes for tensor in tensors if not tensor.is_meta) + _OVERHEAD * (1 + len(tensors)))
    torch.save(state, file)  # type: ignore[arg-type]  # of a file it needs no more than these methods
    return file.contents()


class _MemoryFile:
    """A file in memory. It copies tensors without the interpreter's lock, so that training continues meanwhile.

    Args:
        size: expected number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._memory, self._end = np.empty(size, np.uint8), 0

    def write(self, part: memoryview | bytes) -> int:
        end = self._end + len(part)
        if end > len(self._memory):
            self._memory = np.concatenate([self._memory, np.empty(end, np.uint8)])
        np.copyto(self._memory[self._end : end], np.frombuffer(part, np.uint8))
        self._end = end
        return len(part)

    def flush(self) -> None:
        pass

    def contents(self) -> memoryview:
        return self._memory[: self._end].data


def described(contents: bytes | memoryview) -> dict[str, Any]:
    """Return what the manifest says of a file."""
    return {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}


def manifest(files: Mapping[str, Mapping[str, Any]], *, step: int, world_size: int) -> bytes:
    """Return the contents of manifest.json. Write it last: a folder without it is an incomplete checkpoint.

    Args:
        files: what `described` returns of the state and of the parts of a sharded one, by name.
        step: of the checkpoint.
        world_size: of the run.
    """
    facts = {"format": FORMATS[len(files) > 1], "step": step, "world_size": world_size, "files": files}
    return (json.dumps(facts, indent=2) + "\n").encode()


def load_verified(manifest: bytes, read: Callable[[str], bytes], *, step: int) -> dict[str, Any]:
    """Check a checkpoint and return its state, with its tensors on the CPU, and what is said of its other "parts".

    A sharded one has marks in place of sharded tensors, see checkpoint_parts.py.

    Args:
        manifest: the contents of manifest.json.
        read: returns the contents of a file of the checkpoint, by name.
        step: the step in the folder's name.

    Raises:
        BadCheckpointError: the manifest is broken, of another step or of an unknown format, or the state differs from
            it or contains objects other than tensors and plain values.
    """
    try:
        facts = json.loads(manifest)
        if facts["format"] not in FORMATS:
            raise BadCheckpointError(f"manifest.json has format {facts['format']!r}, this version reads 1 and 3")
        parts = {name: {key: file[key] for key in ("bytes", "sha256")} for name, file in facts["files"].items()}
        expected, its_step = parts.pop(FILE_NAME), facts["step"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpointError(f"manifest.json is broken: {type(error).__name__}: {error}") from error
    if its_step != step:
        raise BadCheckpointError(f"manifest.json is of step {its_step}, not {step}")
    return {**verified(FILE_NAME, read(FILE_NAME), expected), "parts": parts}


def verified(name: str, contents: bytes, facts: Mapping[str, Any]) -> Any:  # noqa: ANN401 (what was saved)
    """Return what a file of a checkpoint holds; raise a BadCheckpointError if it is not what the manifest says."""
    if len(contents) != facts["bytes"]:
        raise BadCheckpointError(f"{name} has {len(contents)} bytes, not {facts['bytes']}")
    if hashlib.sha256(contents).hexdigest() != facts["sha256"]:
        raise BadCheckpointError(f"{name} was changed after it was written: its SHA-256 differs")
    try:
        # weights_only refuses a pickle that would call functions.
        return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise BadCheckpointError(f"{name} cannot be loaded as tensors and plain values only: {text}") from error
