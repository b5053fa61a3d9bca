"""The optimizers, which do not depend on the number of workers, and their groups of parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from raydali.extras import require_extra
from raydali.train.learning_rates import OptimizerName
from raydali.train.learning_rates import learning_rate as learning_rate
from raydali.train.muon import MuonWithAdamW, hidden_matrices

NoDecay = Literal["norms", "norms-and-biases", "none"]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    scales: Mapping[str, float] | None = None,
    no_decay: NoDecay = "norms-and-biases",
) -> list[dict[str, Any]]:
    """Return groups of parameters with and without weight decay.

    Args:
        model: the model; its frozen parameters are in no group.
        weight_decay: the weight decay of the others.
        scales: what the learning rate is multiplied by, for the name of each parameter. Then there are two groups for
            each scale, unless they are empty, and each group has its "lr_scale".
        no_decay: parameters without decay: `norms-and-biases` are all with one dimension; `norms` are those of modules
            with "Norm" in the name of their class, as in torchvision's `set_weight_decay`; or `none`.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    without: Mapping[NoDecay, set[nn.Parameter]] = {
        "norms-and-biases": {parameter for _, parameter in named if parameter.dim() <= 1},
        "norms": {parameter for norm in norms for parameter in norm.parameters(recurse=False)},
        "none": set(),
    }

    def by_decay(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in parameters if p not in without[no_decay]], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p in without[no_decay]], "weight_decay": 0.0},
        ]

    if scales is None:
        return by_decay([parameter for _, parameter in named])
    groups = []
    for scale in dict.fromkeys(scales[name] for name, _ in named):
        of_scale = by_decay([parameter for name, parameter in named if scales[name] == scale])
        groups += [{**group, "lr_scale": scale} for group in of_scale if group["params"]]
    return groups


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all groups of parameters; a group with an "lr_scale" gets its multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def build_optimizer(
    name: OptimizerName,
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    no_decay: NoDecay = "norms-and-biases",
    scales: Mapping[str, float] | None = None,
    head: Collection[str] = (),
) -> Optimizer:
    """Build torch's SGD with momentum or AdamW, timm's LAMB or LARS, or `MuonWithAdamW`; with torch's fused kernels.

    Args:
        name: the optimizer.
        model: the model, on its device.
        learning_rate: the learning rate until `set_learning_rate` sets another one.
        weight_decay: the weight decay; of LAMB and LARS, parameters without it have no trust ratio either.
        momentum: of SGD, LARS and Muon.
        nesterov: of SGD and Muon.
        no_decay: see `parameter_groups`.
        scales: factors of the learning rate for names of parameters, which `set_learning_rate` applies.
        head: names of the head's parameters, which Muon leaves to AdamW.

    Raises:
        UsageError: timm is not installed.
    """
    groups = parameter_groups(model, weight_decay, scales, no_decay)
    fused = next(model.parameters()).is_cuda
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov, fused=fused)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, fused=fused)
    if name == "muon":
        matrices = hidden_matrices(model, head)
        return MuonWithAdamW(groups, matrices, lr=learning_rate, momentum=momentum, nesterov=nesterov, fused=fused)
    require_extra("timm", "timm", "LAMB and LARS")
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    if name == "lamb":
        return Lamb(groups, lr=learning_rate)
    return Lars(groups, lr=learning_rate, momentum=momentum)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the momenta of a checkpoint, but keep the optimizer's current settings.

    The settings also decide where the state is: Adam's `step` is on the GPU only if the kernels are fused. What only
    the checkpoint's groups have is state, too: LAMB's `step`.
    """
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    now = [{**saved, **given, "params": saved["params"]} for given, saved in groups]
    optimizer.load_state_dict({**state, "param_groups": now})
