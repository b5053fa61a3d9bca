"""A copy of what an update of the weights changes, so that an update with a wrong sum of gradients can be undone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer


class UpdateBackup:
    """The weights, momenta and moving average before the newest update. The device needs memory for them again."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._optimizer: Optimizer | None = None
        self._state: dict[torch.Tensor, Mapping[str, Any]] = {}

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: Optimizer, average: nn.Module | None = None) -> None:
        """Copy what an update changes. The host does not wait for the device."""
        self._state = {key: dict(values) for key, values in optimizer.state.items()}
        momenta = [
            each for values in self._state.values() for each in values.values() if isinstance(each, torch.Tensor)
        ]
        averaged = [] if average is None else [*average.parameters(), *average.buffers()]
        tensors = [*(each for each in model.parameters() if each.requires_grad), *averaged, *momenta]
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, self._copies = tensors, [torch.empty_like(tensor) for tensor in tensors]
        _copy(self._copies, tensors)
        self._optimizer = optimizer

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the update, if a copy was taken since the last call of `restore` or `drop`. The host does not wait."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update({key: dict(values) for key, values in self._state.items()})
            _copy(self._tensors, self._copies)
        self.drop()

    def drop(self) -> None:
        """Forget the copy: the update is right."""
        self._optimizer = None


def never_waits(optimizer: Optimizer, scaler: GradScaler) -> bool:
    """Return whether the host is known not to wait for the device in an update, so that it can be queued."""
    return type(optimizer).__module__.startswith(("torch.optim.", "raydali.")) and not scaler.is_enabled()


def _copy(to: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for on_cpu in (False, True):  # a fused copy needs tensors of one device
        here = [index for index, tensor in enumerate(tensors) if tensor.is_cpu is on_cpu]
        if here:
            torch._foreach_copy_([to[index] for index in here], [tensors[index] for index in here])
