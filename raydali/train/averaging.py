"""The moving average of a model's weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


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
        update = get_ema_multi_avg_fn(decay if step else 0.0)
        update([*self.module.parameters()], [*model.parameters()], self.n_averaged)
        self.n_averaged += 1
