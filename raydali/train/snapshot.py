"""Copies of a nested state on the host: at once, or while training goes on."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from raydali.train.checkpoint_file import State, map_tensors


def snapshot(state: State) -> State:
    """Copy a nested state to the CPU, so that later steps do not change it. It waits for the device once."""
    copy = map_tensors(state, lambda tensor: _like(tensor).copy_(tensor.detach(), non_blocking=True))
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
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def take(self, state: State, modules: Iterable[nn.Module] = ()) -> Snapshot:
        """Begin to copy a nested state. Until the next call of `before_update`, only a forward pass may change it.

        Args:
            state: tensors of it that are equal views of the same memory are copied once.
            modules: the modules whose buffers a forward pass changes.
        """
        buffers = {buffer.data_ptr() for module in modules for buffer in module.buffers()}
        known: dict[tuple[object, ...], torch.Tensor] = {}
        at_once, later = _Pairs(), _Pairs()

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if key not in known:
                known[key] = _like(tensor)
                (at_once if key[0] in buffers else later).append((known[key], tensor.detach()))
            return known[key]

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
        self._copied = self._side.record_event(torch.cuda.Event(blocking=True))
        return Snapshot(copy, self._copied)

    def before_update(self) -> None:
        """Let the device, not the host, wait for the end of the newest copy before it continues the current stream."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _copy(pairs: _Pairs) -> None:
    if pairs:
        torch._foreach_copy_([host for host, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)
