"""Builds networks whose weights come from elsewhere, such as a checkpoint: none are drawn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SETS = {"add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "sub_", "uniform_", "zero_"}
"""Methods of tensors by which initialisation sets values."""


def undrawn(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that a function builds, with undefined values of its parameters; all else is as usual.

    A billion weights take half a minute to draw, and memory that nothing writes is not allocated. They are drawn if the
    function fails without, as it computes with them, and if it draws buffers that no state dict has.
    """
    before = torch.get_rng_state()
    with suppress(Exception), _Undrawn():
        network = build()
        keeps_all = not any(module._non_persistent_buffers_set for module in network.modules())
        if keeps_all or torch.equal(torch.get_rng_state(), before):
            return network
    torch.set_rng_state(before)
    return build()


class _Undrawn(TorchFunctionMode):
    """A context in which nothing sets the values of parameters."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 (what the function returns)
        """Return the first argument of what would set a parameter, and otherwise what the function returns."""
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        sets = func.__name__ in _SETS or getattr(func, "__module__", "") == nn.init.__name__
        return target if isinstance(target, nn.Parameter) and sets else func(*args, **kwargs)
