"""The contents of a checkpoint: tensors and plain values, loaded without executing pickled code, and a manifest."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

FILE_NAME = "state.pt"
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
    for tensor in _tensors(state):
        if tensor.is_floating_point():
            sums.setdefault(tensor.device, []).append(tensor.detach().sum().double())
    return all(bool(torch.stack(of_device).isfinite().all()) for of_device in sums.values())


def _tensors(value: State) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def map_tensors(value: State, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """Apply `change` to every tensor of a nested state, in order, and return the new state."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def serialize(state: State) -> memoryview:
    """Return a snapshot as the contents of a file."""
    tensors = [*_tensors(state)]
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


def manifest(files: Mapping[str, memoryview], *, step: int, world_size: int) -> bytes:
    """Return the contents of manifest.json. Write it last: a folder without it is an incomplete checkpoint."""
    described = {
        name: {"bytes": contents.nbytes, "sha256": hashlib.sha256(contents).hexdigest()}
        for name, contents in files.items()
    }
    facts = {"format": 1, "step": step, "world_size": world_size, "files": described}
    return (json.dumps(facts, indent=2) + "\n").encode()


def load_verified(manifest: bytes, read: Callable[[str], bytes], *, step: int) -> dict[str, Any]:
    """Check a checkpoint and return its state, with its tensors on the CPU.

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
        if facts["format"] != 1:
            raise BadCheckpointError(f"manifest.json has format {facts['format']!r}, this version reads 1")
        expected, its_step = facts["files"][FILE_NAME], facts["step"]
        size, digest = expected["bytes"], expected["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadCheckpointError(f"manifest.json is broken: {type(error).__name__}: {error}") from error
    if its_step != step:
        raise BadCheckpointError(f"manifest.json is of step {its_step}, not {step}")
    contents = read(FILE_NAME)
    if len(contents) != size:
        raise BadCheckpointError(f"{FILE_NAME} has {len(contents)} bytes, not {size}")
    if hashlib.sha256(contents).hexdigest() != digest:
        raise BadCheckpointError(f"{FILE_NAME} was changed after it was written: its SHA-256 differs")
    try:
        # weights_only refuses a pickle that would call functions.
        state: dict[str, Any] = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise BadCheckpointError(f"{FILE_NAME} cannot be loaded as tensors and plain values only: {text}") from error
    return state
