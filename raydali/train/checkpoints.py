"""A checkpoint's contents: one file of tensors and plain values, read without executing anything."""

from collections.abc import Mapping
from typing import IO, Any

import torch

FILE_NAME = "state.pt"


def snapshot(state: Any) -> Any:
    """A copy of a nested state on the CPU that later steps do not change; waits for the device once."""
    copy = _copy(state)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copy


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.device.type == "cpu":
            return value.clone()
        host = torch.empty_like(value, device="cpu", pin_memory=True)
        return host.copy_(value, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item) for item in value)
    return value


def write(state: dict[str, Any], file: IO[bytes]) -> None:
    """Write a snapshot to an open binary file."""
    torch.save(state, file)


def read(file: IO[bytes]) -> dict[str, Any]:
    """A state, its tensors on the CPU. Only tensors and plain values are accepted (`weights_only`)."""
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state
