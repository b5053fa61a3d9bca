"""The repeated blocks of a network, what they compute otherwise in training, and activations computed again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from raydali.errors import UsageError


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a network repeats, such as ResNet's bottlenecks or a transformer's layers, in its order.

    They are the modules of one class, none of PyTorch's own, that have at least two matrices each, and together at
    least a quarter of the parameters. Of such classes, blocks are of the one with the most parameters that has at least
    half as many modules as any: stages of blocks are fewer, and parts of blocks smaller. Modules of other classes that
    are in lists as blocks are, such as EfficientNet's first ones, are blocks, too. The list is empty for a network
    without such a class.
    """
    of_class: dict[type, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if not type(module).__module__.startswith("torch.nn.") and _matrices(module) > 1:
            of_class[type(module)].append(module)
    whole = _size(model)
    covers = {one: sum(map(_size, blocks)) for one, blocks in of_class.items() if len(blocks) > 1}
    covers = {one: size for one, size in covers.items() if 4 * size >= whole}
    if not covers:
        return []
    most = max(len(of_class[one]) for one in covers)
    block = max((one for one in covers if 2 * len(of_class[one]) >= most), key=covers.__getitem__)
    return [*_blocks(model, block, set(of_class))]


def _blocks(module: nn.Module, block: type, classes: set[type]) -> Iterator[nn.Module]:
    """Yield the outermost modules of a class, and modules of other classes without them that are in lists."""
    for child in module.children():
        is_listed = type(module) in (nn.Sequential, nn.ModuleList) and type(child) in classes
        if type(child) is block or (is_listed and not any(type(inner) is block for inner in child.modules())):
            yield child
        else:
            yield from _blocks(child, block, classes)


def _matrices(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class OtherForwards:
    """A context in which parts of a model compute otherwise; outside, as in evaluations, they are as they were.

    Args:
        forwards: the parts, and what they call in place of their forward methods.
    """

    def __init__(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._forwards = forwards

    def __enter__(self) -> None:
        for part, forward in self._forwards.items():
            part.__dict__["forward"] = forward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for part in self._forwards:
            del part.__dict__["forward"]


def recomputed(model: nn.Module, blocks_of: Callable[[nn.Module], Iterable[nn.Module]] = repeated_blocks) -> None:
    """Let the blocks of a network keep only their inputs, and compute their activations again in the backward pass.

    Weights, names and results stay the same: random numbers are drawn again, and BatchNorm counts a batch once.

    Raises:
        UsageError: the network repeats no block.
    """
    blocks = [*blocks_of(model)]
    if not blocks:
        raise UsageError(
            f"--activation-checkpointing needs a network of repeated blocks, and {type(model).__name__} has none: "
            "leave it out, or use a smaller --batch-size"
        )
    classes = {one: _recomputed_class(one) for one in set(map(type, blocks))}
    for block in blocks:
        block.__class__ = classes[type(block)]


@contextmanager
def kept_activations() -> Iterator[None]:
    """A context in which blocks keep their activations, for example while operations are counted."""
    _Recomputed.recomputes = False
    try:
        yield
    finally:
        _Recomputed.recomputes = True


class _Recomputed(nn.Module):
    """A block of which autograd keeps the inputs alone.

    Attributes:
        recomputes: whether any block does so now.
    """

    recomputes: ClassVar[bool] = True

    def forward(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401  # those of the block
        """Return the output of the block."""
        forward = super().forward
        if not (self.recomputes and self.training and torch.is_grad_enabled()):
            return forward(*inputs, **named)
        if torch.compiler.is_compiling():  # which counts batches and random numbers once by itself
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._uncounted()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """A context in which layers normalise as in training, and their running statistics stay as they are."""
        norms = [norm for norm in self.modules() if isinstance(norm, _NormBase) and norm.track_running_stats]
        kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm, _, batches in kept:
            norm.momentum, norm.num_batches_tracked = 0.0, None if batches is None else batches.clone()
        try:
            yield
        finally:
            for norm, momentum, batches in kept:
                norm.momentum, norm.num_batches_tracked = momentum, batches


def _recomputed_class(block: type[nn.Module]) -> type[nn.Module]:
    return type(block.__name__, (_Recomputed, block), {"__module__": block.__module__, "__doc__": block.__doc__})
