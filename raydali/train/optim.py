"""The optimizers, which do not depend on the number of workers, and their groups of parameters."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from raydali.extras import require_extra
from raydali.train.learning_rates import OptimizerName
from raydali.train.learning_rates import learning_rate as learning_rate

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


def hidden_matrices(model: nn.Module, head: Collection[str]) -> set[nn.Parameter]:
    """Return the weights that Muon takes: those of linear layers, attention and convolutions, but for the head's.

    Depthwise convolutions and others of one input channel are no matrices of inputs and outputs, as in timm's Muon.
    """
    return {
        parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.MultiheadAttention | _ConvNd)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[1] > 1 and f"{name}.{own}".lstrip(".") not in head
    }


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for the matrices of hidden layers, and torch.optim.AdamW for all other parameters.

    A convolution's weight is a matrix (outputs, rest), as in Keller Jordan's "Muon: An optimizer for hidden layers in
    neural networks". Muon's updates have the size of AdamW's (`match_rms_adamw`: Liu et al., "Muon is Scalable for LLM
    Training", 2025), so both have the same learning rate and weight decay. Muon computes in bf16.

    Args:
        groups: the groups of parameters, each with its weight decay.
        matrices: the parameters that Muon takes.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Collection[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        fused: bool,
    ) -> None:
        # They have no parameters of their own: each step gives them the groups and the state of this optimizer.
        self._muon = torch.optim.Muon(
            [{"params": []}], lr=lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW([{"params": []}], lr=lr, fused=fused)
        split = [
            {**part.defaults, **group, "params": parameters, "muon": part is self._muon}
            for group in groups
            for part in (self._muon, self._adamw)
            if (parameters := [p for p in group["params"] if (p in matrices) is (part is self._muon)])
        ]
        super().__init__(split, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        self._adamw.step()
        matrices: dict[nn.Parameter, torch.Tensor] = {}
        self._muon.param_groups, self._muon.state = [], defaultdict(dict)
        for group in self.param_groups:
            if group["muon"]:
                trained = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in trained:
                    matrices[parameter] = matrix = parameter.detach().flatten(1)
                    matrix.grad = parameter.grad.flatten(1)
                    self._muon.state[matrix] = self.state[parameter]
                self._muon.param_groups.append({**group, "params": [matrices[parameter] for parameter in trained]})
        self._muon.step()
        for parameter, matrix in matrices.items():
            if matrix.data_ptr() != parameter.data_ptr():  # a copy, as the weight is channels-last
                parameter.copy_(matrix.view_as(parameter))


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the momenta of a checkpoint, but keep the optimizer's current settings.

    The settings also decide where the state is: Adam's `step` is on the GPU only if the kernels are fused. What only
    the checkpoint's groups have is state, too: LAMB's `step`.
    """
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    now = [{**saved, **given, "params": saved["params"]} for given, saved in groups]
    optimizer.load_state_dict({**state, "param_groups": now})
