"""The optimizer and its learning rate, which do not depend on the number of workers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer


def parameter_groups(
    model: nn.Module, weight_decay: float, scales: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return groups of parameters with and without weight decay; norms and biases (one dimension) have none.

    Args:
        model: the model; its frozen parameters are in no group.
        weight_decay: the weight decay of the others.
        scales: what the learning rate is multiplied by, for the name of each parameter. Then there are two groups for
            each scale, unless they are empty, and each group has its "lr_scale".
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if scales is None:
        return _by_decay([parameter for _, parameter in named], weight_decay)
    groups = []
    for scale in dict.fromkeys(scales[name] for name, _ in named):
        of_scale = _by_decay([parameter for name, parameter in named if scales[name] == scale], weight_decay)
        groups += [{**group, "lr_scale": scale} for group in of_scale if group["params"]]
    return groups


def _by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def learning_rate(progress: float, *, peak: float, warmup: float) -> float:
    """Return the learning rate of a linear warm-up that is followed by half a cosine to zero.

    Args:
        progress: share of the run's samples that are consumed, 0..1.
        peak: the highest rate, reached at the end of the warm-up.
        warmup: share of the run that the warm-up takes, 0..1.
    """
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all groups of parameters; a group with an "lr_scale" gets its multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def build_optimizer(
    name: Literal["sgd", "adamw"],
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    scales: Mapping[str, float] | None = None,
) -> Optimizer:
    """Build SGD with momentum, or AdamW; on a GPU with fused kernels.

    `weight_decay` applies to the parameters that `parameter_groups` selects, `momentum` and `nesterov` to SGD only.
    `scales` are factors of the learning rate for names of parameters, which `set_learning_rate` applies.
    """
    groups = parameter_groups(model, weight_decay, scales)
    fused = next(model.parameters()).is_cuda
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, fused=fused)
    return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov, fused=fused)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the momenta of a checkpoint, but keep the optimizer's current settings.

    The settings also decide where the state is: Adam's `step` is on the GPU only if the kernels are fused.
    """
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    now = [{**given, "params": saved["params"]} for given, saved in groups]
    optimizer.load_state_dict({**state, "param_groups": now})
