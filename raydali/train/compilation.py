"""How models are compiled: the settings of torch.compile, for training and for validation."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

MAX_SHAPES = 64
"""Number of shapes of inputs for which torch.compile compiles a model; beyond it, the model would run eagerly."""


def compile_function(function: Callable[..., Result], *, fused: bool | None = False) -> Callable[..., Result]:
    """Return the function compiled for each shape of its inputs. What cannot be compiled runs eagerly, and is logged.

    Args:
        function: a function or a module.
        fused: whether models in it get fused BatchNorm in training, see fused/graph.py; None means False.
    """
    import torch._dynamo.config  # it takes seconds

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    options: dict[str, str | int | bool | Callable[..., object]] | None = None
    if fused:
        from raydali.train.fused.graph import inductor_options

        options = inductor_options()
    return torch.compile(function, dynamic=False, options=options)
