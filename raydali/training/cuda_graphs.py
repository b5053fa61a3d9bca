"""CUDA graphs: the capture of a function, and parts of a model as graphs where shapes of its loss depend on data."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from raydali.training.blocks import OtherForwards

Result = TypeVar("Result")
Nested = Any
"""A tensor, or mappings and sequences of them."""

WARM_UP_STEPS = 3
"""Number of eager steps before the capture of a CUDA graph: compilation and autotuning must be complete."""

_log = logging.getLogger(__name__)


def capture(
    function: Callable[[], Result], what: str, after: torch.cuda.CUDAGraph | None = None
) -> tuple[torch.cuda.CUDAGraph, Result] | None:
    """Capture a function as a CUDA graph on the current stream; return the graph, and what the function returned.

    If it cannot be captured, this is logged of `what`, and None returned.

    Args:
        function: what is captured.
        what: its name.
        after: a graph that is always replayed before this one, which may use its tensors and its memory.
    """

    def capturing(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads may use CUDA meanwhile, for example NCCL's watchdog.
        pool = None if after is None else after.pool()
        return torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local")

    try:
        with capturing(graph := torch.cuda.CUDAGraph()):
            return graph, function()
    except RuntimeError as error:
        _log.warning("%s cannot be captured as a CUDA graph, so its kernels are launched one by one: %s", what, error)
    # PyTorch leaves its generator as if the capture went on, and refuses random numbers; another capture resets it.
    with suppress(RuntimeError), capturing(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
    return None


class GraphedParts(OtherForwards):
    """A context in which parts of a model replay CUDA graphs of their forward and backward pass.

    Each part is captured in its fourth call. Calls with tensors of other shapes launch its kernels one by one. So does
    a part that cannot be captured, which is logged.

    Args:
        parts: modules whose shapes are constant in training. They take nested sequences of tensors, and return nested
            tensors that all have gradients. They need a stream other than the default one.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__({part: _GraphedPart(part) for part in parts if _trained(part)})


class _GraphedPart:
    """The forward method of a part."""

    def __init__(self, part: nn.Module) -> None:
        self._name, self._launch, self._trained = type(part).__name__, part.forward, _trained(part)
        self._calls_to_capture = WARM_UP_STEPS
        self._inputs: list[torch.Tensor] = []

    def __call__(self, *nested: Nested) -> Nested:
        inputs, form = tree_flatten(nested)
        if self._calls_to_capture == 0:
            self._capture(inputs, form)
        self._calls_to_capture -= 1
        if [*map(_kind, inputs)] != [*map(_kind, self._inputs)]:
            return self._launch(*nested)
        return tree_unflatten(_Replay.apply(self, *inputs, *self._trained), self._form)

    def _capture(self, tensors: list[torch.Tensor], form: TreeSpec) -> None:
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]

        def backward() -> tuple[torch.Tensor | None, ...]:
            with torch.autocast("cuda", enabled=False):
                return torch.autograd.grad(outputs, needed, self._output_gradients, allow_unused=True)

        forward = capture(lambda: self._launch(*tree_unflatten(inputs, form)), self._name)
        torch.clear_autocast_cache()  # it holds casted weights, which are in the graph's memory
        if forward is None:
            return
        outputs, self._form = tree_flatten(forward[1])
        self._output_gradients = [torch.zeros_like(output) for output in outputs]
        needed = [tensor for tensor in (*inputs, *self._trained) if tensor.requires_grad]
        captured = capture(backward, self._name)
        if captured is not None:
            (self._forward, _), (self._backward, self._gradients) = forward, captured
            self._inputs, self._outputs = inputs, [output.detach() for output in outputs]

    def replay(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch._foreach_copy_(self._inputs, list(tensors[: len(self._inputs)]))  # the parameters follow
        self._forward.replay()
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(self, of_outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor | None]:
        """Return the gradients of inputs and parameters, in memory of their own: they may be added to.

        Args:
            of_outputs: the gradients of the outputs.
        """
        torch._foreach_copy_(self._output_gradients, list(of_outputs))
        self._backward.replay()
        copies = iter(None if gradient is None else gradient.clone() for gradient in self._gradients)
        return (next(copies) if tensor.requires_grad else None for tensor in (*self._inputs, *self._trained))


class _Replay(Function):
    """A replay as an operation that autograd knows."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: _GraphedPart, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part  # type: ignore[attr-defined]  # it is meant for that
        return part.replay(tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.part.replay_backward(gradients)  # type: ignore[attr-defined]


def _trained(part: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in part.parameters() if parameter.requires_grad]


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return tensor.shape, tensor.dtype, tensor.requires_grad
