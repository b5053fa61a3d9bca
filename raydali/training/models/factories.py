"""Models of other packages, by name, and their stochastic depth, which leaves out residual branches at random.

They are `timm:NAME`, and `package.module:factory`, which is any function or class.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.text import error_line

TIMM = "timm:"
_SIZES = "image_size", "img_size", "input_size"


def is_timm(name: str) -> bool:
    """Return whether the name stands for a model of timm: `timm:NAME`."""
    return name.startswith(TIMM)


def is_factory(name: str) -> bool:
    """Return whether the name stands for a factory: `package.module:factory`."""
    return ":" in name and not is_timm(name)


def known_timm_models() -> list[str]:
    """Return the names of timm's models, each with its prefix.

    Raises:
        UsageError: timm is not installed.
    """
    require_extra("timm", "timm", "models of timm")
    import timm

    return [TIMM + name for name in timm.list_models()]


def timm_settings(name: str) -> Any:  # noqa: ANN401 (timm's PretrainedCfg, which is not always installed)
    """Return timm's settings of a model's published weights; the name may end with their tag, as `.in12k_ft_in1k`.

    Raises:
        UsageError: timm is not installed, or has no weights of this tag.
    """
    require_extra("timm", "timm", "models of timm")
    import timm

    try:
        return timm.get_pretrained_cfg(name.removeprefix(TIMM)) or timm.models.PretrainedCfg()
    except RuntimeError as error:
        model, _, tag = name.removeprefix(TIMM).partition(".")
        tags = sorted(variant.partition(".")[2] for variant in timm.list_pretrained(f"{model}.*"))
        raise UsageError(f"--model {name}: {model} has no weights named {tag}: try {' or '.join(tags[:3])}") from error


def build_timm(
    name: str, classes: int, image_size: int | None, *, pretrained: bool = False, drop_path: float | None = None
) -> nn.Module:
    """Return timm's model, randomly initialised or pretrained; those made for one image size are made for this one.

    Raises:
        UsageError: see `timm_settings`; the model has no stochastic depth whose probability `drop_path` could set.
    """
    settings = timm_settings(name)
    import timm
    from timm.layers.drop import DropPath

    options: dict[str, Any] = {"img_size": image_size} if settings.fixed_input_size and image_size else {}
    if drop_path is not None:
        options["drop_path_rate"] = drop_path
    try:
        model: nn.Module = timm.create_model(name.removeprefix(TIMM), pretrained, num_classes=classes, **options)
    except TypeError as error:
        if "drop_path_rate" in str(error):
            raise no_stochastic_depth(name) from error
        raise
    if drop_path and not any(isinstance(module, DropPath) for module in model.modules()):
        raise no_stochastic_depth(name)
    return model


def no_stochastic_depth(name: str) -> UsageError:
    """Return the error of a model that has no stochastic depth, or one that is not known."""
    return UsageError(
        f"--model {name} has no known stochastic depth: leave out --drop-path, or give a model such as resnet50, "
        "convnext_tiny or timm:vit_small_patch16_224"
    )


def set_drop_path(model: nn.Module, probability: float) -> bool:
    """Set the probability that a sample skips the last residual branch; return whether the model has such branches.

    It rises linearly over the blocks (Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016). Where a model
    has layers of torchvision's StochasticDepth, such as ConvNeXt, EfficientNet and Swin, the proportions stay as its
    own, if they are not all 0. ResNets of torchvision have none: there, too, it rises from 0 in the first block, as in
    timm's, and parameters keep their names.

    Args:
        model: a model of torchvision, or one of its layers.
        probability: of the last branch, 0 to 1.
    """
    from torchvision.models.resnet import BasicBlock, Bottleneck  # imports torchvision: seconds
    from torchvision.ops import StochasticDepth, stochastic_depth

    depths = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    largest = max((depth.p for depth in depths), default=0.0)
    for index, depth in enumerate(depths):
        depth.p = probability * (depth.p / largest if largest else index / max(1, len(depths) - 1))
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for index, block in enumerate(blocks):
        last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        share = probability * index / max(1, len(blocks) - 1)
        last.register_forward_hook(partial(_drop, stochastic_depth, probability=share))
    return bool(depths or blocks)


def _drop(
    stochastic_depth: Callable[..., torch.Tensor],
    norm: nn.Module,
    _inputs: object,
    branch: torch.Tensor,
    *,
    probability: float,
) -> torch.Tensor:
    """Leave out the output of a branch for some samples, after the branch's last norm."""
    return stochastic_depth(branch, probability, "row", norm.training)


def takes_size(name: str) -> str:
    """Return the argument by which a factory takes the images' size; empty if it takes none.

    Raises:
        UsageError: see `find_factory`.
    """
    try:
        parameters = inspect.signature(find_factory(name)).parameters
    except ValueError:  # written in C
        return ""
    return next((size for size in _SIZES if size in parameters), "")


def build_by_factory(name: str, classes: int, image_size: int) -> nn.Module:
    """Return what a factory makes of `num_classes`, and of `image_size`, `img_size` or `input_size` if it takes one.

    Raises:
        UsageError: see `find_factory`; the factory returned something else than a module.
    """
    size = takes_size(name)
    model = find_factory(name)(num_classes=classes, **({size: image_size} if size else {}))
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned a value of type {type(model).__name__}, not a torch.nn.Module")
    return model


def find_factory(name: str) -> Callable[..., Any]:
    """Import the module, and return the factory.

    Raises:
        UsageError: the module cannot be imported, or has no such callable.
    """
    path, _, attribute = name.partition(":")
    if "/" in path or path.endswith(".py"):
        raise UsageError(f"--model {name} names a file: give its module as package.module:{attribute or 'factory'}")
    try:
        value: Any = importlib.import_module(path)
    except (Exception, SystemExit) as error:  # a module may raise anything; a script may parse the options
        raise UsageError(
            f"--model {name}: cannot import {path} ({_short(error)}): "
            "correct it, check PYTHONPATH, or install it on every node"
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UsageError(f"--model {name}: {path} has no {attribute or 'factory'}: give package.module:factory")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"--model {name} is a value of type {type(value).__name__}, not a function that makes a model")
    factory: Callable[..., Any] = value
    return factory


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_line(error)}"[:60]
