"""The moving average of a model's weights."""

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

    def update_parameters(self, model: nn.Module) -> None:
        """Include the weights after a step."""
        step = int(self.n_averaged)  # on the CPU, on any device of the model
        decay = min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay
        self.multi_avg_fn = get_ema_multi_avg_fn(decay)
        super().update_parameters(model)
