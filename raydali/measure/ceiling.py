"""The ceiling: how fast the training step is when its batch lies on the device already."""

import time
from collections.abc import Callable

import torch

MOST_STEPS, FEWEST_STEPS = 60, 3


def ceiling_images_per_second(
    step: Callable[[], object],
    images: int,
    device: torch.device,
    total: Callable[[torch.Tensor], torch.Tensor],
    *,
    seconds: float = 1.5,
) -> float:
    """Images a second of all ranks together, each running its steps over and over; every rank must call it.

    Args:
        step: one whole optimiser step on a resident batch, everything compiled and tuned already.
        images: that a rank's step consumes.
        total: the sum over ranks of a small tensor, behind which none is ahead (`Worker.sum`).
        seconds: how long to measure, about; at least FEWEST_STEPS and at most MOST_STEPS steps.
    """

    def timed(steps: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return time.perf_counter() - began

    def added_up(value: float) -> float:
        return total(torch.tensor(value, dtype=torch.float64)).item()

    # All ranks take the same number of steps, though none is as fast as the other.
    ranks, taken = added_up(1), added_up(timed(2))
    steps = round(min(max(seconds * ranks * 2 / taken, FEWEST_STEPS), MOST_STEPS))
    return added_up(images * steps / timed(steps))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
