"""What counts as a bad loss, and that a step that is taken back leaves no trace, whatever the optimizer."""

from typing import Any, get_args

import pytest
import torch
from torch import nn

from raydali.training.bad_losses import LEAST, WINDOW, LossWatch, LossWindow
from raydali.training.forward_backward import Precision
from raydali.training.learning_rates import OptimizerName
from raydali.training.optim import MovingAverage, build_optimizer
from raydali.training.worker import Worker

CPU = torch.device("cpu")
FINE = torch.ones(())


def judged(*losses: float, window: LossWindow | None = None) -> list[bool]:
    window = window or LossWindow(CPU)
    return [bool(window.is_bad(torch.tensor(loss, dtype=torch.float64), FINE)) for loss in losses]


def test_a_loss_is_bad_if_it_jumps_beyond_the_usual_spread() -> None:
    usual = [1.0 + 0.01 * (step % 5) for step in range(LEAST)]
    assert not any(judged(*usual))
    assert judged(*usual, 2.03, 2.06)[-2:] == [False, True]  # the median is 1.02, and the spread is small
    spread = [1.0 + 0.1 * (step % 5) for step in range(LEAST)]
    assert judged(*spread, 3.1, 3.3)[-2:] == [False, True]  # 20 deviations of 0.1 above 1.2
    assert not any(judged(*[1.0] * (LEAST - 1), 100.0)), "the first losses of a run fall and jump"
    assert not any(judged(*[-5.0] * LEAST, -0.1)), "losses may be negative"


def test_what_is_not_finite_is_always_bad_and_does_not_become_usual() -> None:
    assert judged(float("nan"), float("inf"), 1.0) == [True, True, False]
    window = LossWindow(CPU)
    assert judged(*[1.0] * LEAST, *[float("nan")] * WINDOW, 1.0, 3.0, window=window)[-2:] == [False, True]
    assert bool(window.is_bad(torch.tensor(1.0), torch.tensor(float("nan")))), "nor may a gradient be"


def test_a_jump_that_lasts_becomes_usual() -> None:
    found = judged(*[1.0] * WINDOW, *[5.0] * WINDOW)
    assert found[WINDOW] and not found[-1]


def test_a_window_goes_on_from_its_state() -> None:
    window, other = LossWindow(CPU), LossWindow(CPU)
    judged(*[1.0] * LEAST, window=window)
    other.load_state_dict(window.state_dict())
    assert judged(3.0, window=other) == [True]


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_taken_back_leaves_no_trace(name: OptimizerName, first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = build_optimizer(name, model, learning_rate=0.1, weight_decay=0.1, head={"4.weight"})
    average, loss_sum = MovingAverage(model, 0.9), torch.zeros((), dtype=torch.float64)
    worker = Worker(rank=0, world_size=1, device=CPU, cpus=1, node="")
    watch = LossWatch(worker, Precision("fp32", CPU), micro_batches=1, reaction="skip")
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "ema": average}

    def step(number: int, images: torch.Tensor) -> None:
        watch.begin_step(number, parts.values(), loss_sum)
        loss = model(images).square().mean()
        loss.backward()
        watch.after_backward(loss.detach(), None, None, ())  # type: ignore[arg-type]
        loss_sum.add_(loss.detach())
        watch.before_update(
            nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        )
        optimizer.step()
        average.update_parameters(model)
        watch.after_update()
        optimizer.zero_grad()

    def state() -> list[torch.Tensor]:
        momenta = [
            value.clone() for of_one in optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)
        ]
        tensors = (*model.parameters(), *model.buffers(), *average.module.parameters(), *average.module.buffers())
        return [loss_sum.clone(), *(tensor.detach().clone() for tensor in tensors), *momenta]

    images = torch.rand(4, 3, 8, 8)
    broken = images.clone()
    broken[0, 0, 0, 0] = float("nan")
    if not first:
        step(0, images)
    before = state()
    step(1, broken)
    for was, now in zip(before, state(), strict=False):
        torch.testing.assert_close(now, was, rtol=0, atol=0)
    assert not any(momentum.any() for momentum in state()[len(before) :]), "new momenta are zero"
    step(2, images)
    assert all(tensor.isfinite().all() for tensor in state())
    assert not torch.equal(state()[1], before[1])
    assert [(number, is_bad) for number, _, _, is_bad in watch.judged(wait=True)][-2:] == [(1, True), (2, False)]
