"""Updates by Muon as raydali has it, next to those by torch's own, matrix by matrix, with the same gradients."""

import copy
from typing import Any

import torch
from torch import nn

from raydali.training.optim import build_optimizer, hidden_matrices, load_optimizer, set_learning_rate


class ComparedMuon:
    """A model's optimizer, and torch's Muon on copies of the matrices.

    Args:
        keeps_gradients: whether the gradients of all steps are the same tensors, as those of a captured step are.
    """

    def __init__(self, model: nn.Module, *, keeps_gradients: bool) -> None:
        options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
        scales = {name: (0.5, 1.0)[index % 2] for index, (name, _) in enumerate(model.named_parameters())}
        self.optimizer = build_optimizer("muon", model, learning_rate=0.0, scales=scales, **options)
        self.matrices = {each: nn.Parameter(each.detach().flatten(1).clone()) for each in hidden_matrices(model, ())}
        groups = [
            {"params": [self.matrices[each] for each in group["params"]], "lr_scale": group["lr_scale"]}
            for group in self.optimizer.param_groups
            if group["muon"]
        ]
        self.torchs = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **options)
        self._model, self._keeps_gradients = model, keeps_gradients

    def step(self, rate: float, seed: int = 0) -> None:
        """Update the weights of both with the gradients of this seed."""
        torch.manual_seed(seed)
        for parameter in self._model.parameters():
            if parameter.grad is None or not self._keeps_gradients:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.normal_()
            if parameter in self.matrices:
                self.matrices[parameter].grad = parameter.grad.flatten(1).clone()
        for optimizer in (self.optimizer, self.torchs):
            set_learning_rate(optimizer, rate)
            optimizer.step()

    def drop_gradients(self) -> None:
        """Let the gradients of the next steps be other tensors than those before."""
        for parameter in self._model.parameters():
            parameter.grad = None

    def reload(self) -> None:
        """Load the momenta of the optimizer, as from a checkpoint."""
        load_optimizer(self.optimizer, copy.deepcopy(self.optimizer.state_dict()))

    def check(self) -> None:
        """Compare: momenta bit by bit, and weights within the rounding of some updates in fp32.

        An update in bf16 that is rounded in another way differs by more: by 2^-9 of its size.
        """
        for parameter, matrix in self.matrices.items():
            ours, theirs = self.optimizer.state[parameter], self.torchs.state[matrix]
            torch.testing.assert_close(ours["momentum_buffer"], theirs["momentum_buffer"], rtol=0, atol=0)
            torch.testing.assert_close(parameter.flatten(1), matrix, rtol=1e-6, atol=1e-6)

    def addresses(self) -> list[int]:
        """Return the addresses of the momenta in the optimizer's state."""
        return [self.optimizer.state[parameter]["momentum_buffer"].data_ptr() for parameter in self.matrices]
