"""Fine-tuning: layers that are frozen, and layers that learn more slowly the further they are from the head."""

import re
from collections.abc import Collection, Iterator

from torch import nn

from raydali.errors import UsageError
from raydali.text import summarize

_LISTS = nn.Sequential, nn.ModuleList


def expression(option: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression that an option gives.

    Raises:
        UsageError: it is invalid.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression ({error}): try {option} '[^.]*'") from error


def freeze(model: nn.Module, pattern: str) -> list[str]:
    """Freeze the parameters whose names match a regular expression, and return their names.

    The expression is matched from the beginning of a name, as by `re.match`: `features` freezes `features.0.weight`,
    and `(?!classifier)` all but the classifier. Frozen parameters get no gradients. Where all parameters of a
    BatchNorm are frozen, its statistics are, too: it stays in evaluation mode, so call this on a model in training
    mode, and then `evaluating` instead of `model.train()`. Dropout in a frozen part stays as it is.

    Raises:
        UsageError: the expression is invalid, or matches no name or every name.
    """
    matches = expression("--freeze", pattern).match
    names = [name for name, _ in model.named_parameters()]
    frozen = [name for name in names if matches(name)]
    if not frozen:
        raise UsageError(f"--freeze {pattern!r} matches no parameter: give the beginning of a name: {summarize(names)}")
    if len(frozen) == len(names):
        raise UsageError(f"--freeze {pattern!r} matches all parameters: leave some to train, such as {names[-1]}")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            own = [f"{name}.{weight}".lstrip(".") for weight, _ in module.named_parameters()] or [f"{name}.weight"]
            if all(map(matches, own)):
                module.eval()
    return frozen


def learning_rate_scales(
    model: nn.Module, head: Collection[str], *, layer_decay: float, head_lr_scale: float
) -> dict[str, float]:
    """Return what the learning rate of each parameter is multiplied by, by name.

    The head has `head_lr_scale`, and another layer `layer_decay` to the power of its distance from the head (BEiT,
    Bao et al., ICLR 2022). Layers are blocks, and runs of parameters between blocks, in the order of
    `named_parameters`. A block is a module with children in an nn.Sequential or nn.ModuleList, which may be nested
    (subclasses of these are blocks themselves), or beside another module of its class, as GoogLeNet has them. What
    follows the last block, usually a norm, belongs to its layer. A network without blocks, such as VGG, is one layer.

    This equals timm's `param_groups_layer_decay` for its vision transformers. For models in stages of their own class,
    such as timm's ConvNeXt, a stage is a layer here, but a block is one there.

    Args:
        model: the model.
        head: names of the head's parameters (`head_names`).
        layer_decay: scale from one layer to the one before it, above 0 and at most 1.
        head_lr_scale: scale of the head.
    """
    blocks = {name: block for block, module in _blocks(model) for name, _ in module.named_parameters(block)}
    body = [name for name, _ in model.named_parameters() if name not in head]
    layers: list[list[str]] = []
    for before, name in zip([None, *body], body, strict=False):
        if before is None or blocks.get(before) != blocks.get(name):
            layers.append([])
        layers[-1].append(name)
    if len(layers) > 1 and layers[-1][0] not in blocks:
        after = layers.pop()
        layers[-1] += after
    scales = {name: layer_decay**distance for distance, layer in enumerate(reversed(layers), 1) for name in layer}
    return {name: scales.get(name, head_lr_scale) for name, _ in model.named_parameters()}


def _blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks inside a module with their names."""
    for own, child in module.named_children():
        inside = f"{name}.{own}".lstrip(".")
        if _is_block(module, child):
            yield inside, child
        else:
            yield from _blocks(child, inside)


def _is_block(parent: nn.Module, child: nn.Module) -> bool:
    """Return whether a module is a block; lists of blocks are none, but lists of layers without children are."""
    if type(child) in _LISTS:
        return type(parent) in _LISTS and _has_children(child) and not any(map(_has_children, child.children()))
    beside = [other for other in parent.children() if type(other) is type(child)]
    return _has_children(child) and (type(parent) in _LISTS or len(beside) > 1)


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())
