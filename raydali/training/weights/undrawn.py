"""Builds networks whose weights come from elsewhere, such as a checkpoint: none are drawn. Measurements need others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from raydali.training.checkpoint_file import local

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


@torch.no_grad()
def draw_zeros(modules: Iterable[nn.Module]) -> None:
    """Draw the parameters that have zeros only, such as those of heads before training, from a normal distribution.

    Steps that are timed need gradients as in training: where a zero multiplies them, all of those before it are zero.
    For zeros a GPU needs less power, so that ViTs of torchvision would be 7 % too fast. The deviation is 0.02. Nothing
    is drawn from PyTorch's own generators.
    """
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        values = local(parameter)
        if values.is_floating_point() and not values.any():
            values.normal_(std=0.02, generator=torch.Generator(values.device).manual_seed(0))


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
