"""Moving averages of weights, against their definition."""

import pytest
import torch
from torch import nn

from raydali.train.optim import MovingAverage


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("cut", [None, 1, 3])
def test_the_average_of_all_steps(warmup: bool, cut: int | None) -> None:
    """With a resume after some steps, which continues exactly."""
    model = nn.Linear(1, 1, bias=False)
    average = MovingAverage(model, 0.5, warmup=warmup)
    expected = 0.0
    for step, weight in enumerate((3.0, 5.0, -2.0, 8.0, 4.0, 1.0, 0.0, 7.0, 2.0, 6.0)):
        if step == cut:
            saved = average.state_dict()
            average = MovingAverage(model, 0.5, warmup=warmup)
            average.load_state_dict(saved)
        nn.init.constant_(model.weight, weight)
        average.update_parameters(model)
        decay = min(0.5, (1 + step) / (10 + step)) if warmup else 0.5  # 2/11 in step 1, 0.5 from step 8
        expected = decay * expected + (1 - decay) * weight if step else weight
        torch.testing.assert_close(average.module.weight, torch.tensor([[expected]]))
