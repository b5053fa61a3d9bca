"""The optimizers, their groups of parameters, and the moving average of weights; Muon is one CUDA graph on a GPU."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.weak import TensorWeakRef

from raydali.extras import require_extra
from raydali.training.checkpoint_file import is_sharded, local, sharded_like
from raydali.training.cuda_graphs import capture
from raydali.training.learning_rates import OptimizerName
from raydali.training.learning_rates import learning_rate as learning_rate
from raydali.training.learning_rates import set_learning_rate as set_learning_rate

BRANCHES = 8
"""Branches of Muon's CUDA graph, which compute at the same time: most matrices are too small to occupy a GPU."""
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
        no_decay: parameters without decay: `norms-and-biases` are all with one dimension; `norms` are parameters of
            modules with "Norm" in the name of their class, as in torchvision's `set_weight_decay`; or `none`.
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
    first = next(model.parameters())
    fused = first.is_cuda
    if name == "sgd":  # of which PyTorch has no fused kernels for sharded parameters
        kernels: dict[str, bool] = {"foreach": True} if is_sharded(first) else {"fused": fused}
        return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov, **kernels)
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
    now = [{**saved, **current, "params": saved["params"]} for current, saved in groups]
    load_momenta(optimizer, {**state, "param_groups": now})


def load_momenta(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict. Momenta are sharded as their weights are, and get their strides, which fused kernels need.

    A sharded run saves momenta of a convolution in another order than a whole model may have.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):  # before the device gets whole ones
        of_parameters = {
            index: {name: sharded_like(parameters[index], value) for name, value in saved.items()}
            for index, saved in state["state"].items()
        }
        state = {**state, "state": of_parameters}
    optimizer.load_state_dict(state)
    for parameter, of_parameter in optimizer.state.items():
        for name, value in of_parameter.items():
            is_momentum = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_momentum and local(value).stride() != local(parameter).stride():
                of_parameter[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class MovingAverage(AveragedModel):
    """An exponential moving average of the weights of all steps. The first step sets it to the weights.

    Args:
        model: the model; the average has its own copy.
        decay: decay per step.
        warmup: whether the decay in step t is at most (1 + t) / (10 + t), where step 0 is the first of the run, as in
            TensorFlow's ExponentialMovingAverage. The number of steps is saved with the average.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = False) -> None:
        super().__init__(model)
        self._decay, self._warmup = decay, warmup

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Include the weights after a step. The host does not wait for the device, as torch's own update does."""
        step = int(self.n_averaged)  # on the CPU, on any device of the model
        decay = min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay
        averages, weights = ([*map(local, module.parameters())] for module in (self.module, model))
        if step:
            get_ema_multi_avg_fn(decay)(averages, weights, self.n_averaged)
        else:  # its own may be undefined: see weights/undrawn.py
            torch._foreach_copy_(averages, weights)
        self.n_averaged += 1


def hidden_matrices(model: nn.Module, head: Collection[str]) -> set[nn.Parameter]:
    """Return the weights of linear layers, attention and convolutions, which Muon takes, but for the head's.

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
        momentum: of Muon, like `nesterov`; it does not change afterwards.
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
        # They have no parameters of their own: each step gives them some.
        muon = torch.optim.Muon(
            [{"params": []}], lr=lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW([{"params": []}], lr=lr, fused=fused)
        self._directions = _Directions(muon)
        split = [
            {**part.defaults, **group, "params": parameters, "muon": part is muon}
            for group in groups
            for part in (muon, self._adamw)
            if (parameters := [p for p in group["params"] if (p in matrices) is (part is muon)])
        ]
        super().__init__(split, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        self._adamw.step()
        groups = [
            (group, [parameter for parameter in group["params"] if parameter.grad is not None])
            for group in self.param_groups
            if group["muon"]
        ]
        directions = self._directions.compute([parameter for _, trained in groups for parameter in trained], self.state)
        for group, trained in groups:
            if trained:
                torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(trained, [directions[parameter] for parameter in trained], alpha=group["lr"])


class _Directions:
    """Computes what Muon adds to each matrix at learning rate 1, without weight decay: its update of zeros.

    torch's Muon launches about 25 kernels per matrix, which take the host longer than a GPU. So they become a CUDA
    graph as soon as the gradients of two steps are the same tensors, as after a captured backward pass. Learning
    rates are no part of it, as they differ in each step. Momenta stay where they are, although `load_state_dict`
    replaces them.
    """

    def __init__(self, muon: torch.optim.Muon) -> None:
        self._muon = muon
        self._directions: dict[nn.Parameter, torch.Tensor] = {}
        self._momenta: dict[nn.Parameter, torch.Tensor] = {}
        self._gradients: list[TensorWeakRef] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = True

    def compute(
        self, parameters: Sequence[nn.Parameter], state: Mapping[torch.Tensor, MutableMapping[str, Any]]
    ) -> Mapping[nn.Parameter, torch.Tensor]:
        """Update the momenta in the state of these parameters, and return the directions, valid until the next call."""
        for parameter in parameters:
            self._place(parameter, state[parameter])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before = [reference() for reference in self._gradients]
        if len(gradients) != len(before) or any(now is not old for now, old in zip(gradients, before, strict=True)):
            self._graph, self._gradients = None, [TensorWeakRef(gradient) for gradient in gradients]
        elif self._graph is None and self._captures and gradients and gradients[0].is_cuda:
            self._capture(parameters)
        if self._graph is None:
            self._update(parameters)
        else:
            self._graph.replay()
        return self._directions

    def _place(self, parameter: nn.Parameter, state: MutableMapping[str, Any]) -> None:
        """Move the parameter's momentum to the tensor that belongs to it for good."""
        if parameter not in self._directions:
            self._directions[parameter] = torch.empty_like(parameter)
            self._momenta[parameter] = parameter.new_zeros(parameter.shape[0], parameter[0].numel())
        momentum, loaded = self._momenta[parameter], state.get("momentum_buffer")
        if loaded is None:
            momentum.zero_()
        elif loaded is not momentum:
            momentum.copy_(loaded)
        state["momentum_buffer"] = momentum

    def _update(self, parameters: Sequence[nn.Parameter]) -> None:
        matrices = {parameter: torch.zeros_like(self._momenta[parameter]) for parameter in parameters}
        settings = {**self._muon.defaults, "lr": 1.0, "weight_decay": 0.0}
        self._muon.param_groups = [{**settings, "params": [*matrices.values()]}]
        self._muon.state.clear()
        for parameter, matrix in matrices.items():
            assert parameter.grad is not None
            matrix.grad = parameter.grad.flatten(1)
            self._muon.state[matrix] = {"momentum_buffer": self._momenta[parameter]}
        self._muon.step()
        for parameter, matrix in matrices.items():
            self._directions[parameter].copy_(matrix.view_as(parameter))

    def _capture(self, parameters: Sequence[nn.Parameter]) -> None:
        stream = torch.cuda.current_stream()
        branches = [torch.cuda.Stream(priority=stream.priority) for _ in range(BRANCHES)]

        def update() -> None:
            for index, branch in enumerate(branches):
                branch.wait_stream(stream)
                with torch.cuda.stream(branch):
                    self._update(parameters[index::BRANCHES])
            for branch in branches:
                stream.wait_stream(branch)

        captured = capture(update, "Muon")
        if captured is None:
            self._captures = False
        else:
            self._graph, _ = captured
