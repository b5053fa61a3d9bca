"""The learning rate of a run: its usual peak for each optimizer, its warm-up, and its decay.

It is a function of the samples consumed, so it depends neither on the number of workers nor on the steps of an epoch.
"""

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from raydali.errors import UsageError

if TYPE_CHECKING:  # the command line needs no PyTorch to check options
    from torch.optim import Optimizer

OptimizerName = Literal["sgd", "adamw", "lamb", "lars", "muon"]
PEAKS: Mapping[OptimizerName, float] = {
    "sgd": 0.1,  # Goyal et al., 2017
    "adamw": 5e-4,
    "lamb": 5e-3 / 8,  # 0.005 for 2048 images: Wightman et al., "ResNet strikes back", 2021, recipes A1 and A2
    "lars": 0.3,  # Chen et al., SimCLR, 2020
    "muon": 5e-4,  # as adamw, to which the size of its updates is matched: Liu et al., 2025
}
"""Usual peaks for image classifiers with random weights, per 256 images of the global batch."""
SCHEDULES: Mapping[str, str] = {"cosine": "cosine", "step": "step:30,0.1", "poly": "poly:1", "wsd": "wsd:0.2"}
"""An example for each schedule."""


def learning_rate(
    progress: float,
    *,
    peak: float,
    warmup: float,
    warmup_start: float = 0.0,
    minimum: float = 0.0,
    schedule: str = "cosine",
    epochs: float = 1.0,
) -> float:
    """Return the learning rate of a linear warm-up that is followed by a decay.

    Args:
        progress: share of the run's samples that are consumed, 0..1.
        peak: the highest rate, reached at the end of the warm-up.
        warmup: share of the run that the warm-up takes, 0..1.
        warmup_start: rate at the beginning of the warm-up, as a share of the peak.
        minimum: rate at the end of the run.
        schedule: `cosine` for half a cosine (Loshchilov & Hutter, ICLR 2017), `poly:POWER` for a polynomial, both from
            the end of the warm-up to the minimum; `step:EPOCHS,FACTOR` multiplies the peak by the factor each time that
            so many epochs of the run are over, but not below the minimum; `wsd:SHARE` keeps the peak until a linear
            decay to the minimum in the last share of the run, `wsd` in the last fifth (warm-up, stable, decay: Hu et
            al., MiniCPM, 2024; Hägele et al., NeurIPS 2024).
        epochs: the number of epochs of the run, for `step`.

    Raises:
        UsageError: no such schedule.
    """
    name, numbers = parse_schedule(schedule)
    if progress < warmup:
        return peak * (warmup_start + (1 - warmup_start) * progress / warmup)
    if name == "step":
        every, factor = numbers
        return max(minimum, peak * math.pow(factor, progress * epochs // every))
    begin = max(warmup, 1 - numbers[0]) if name == "wsd" else warmup
    share = max(0.0, progress - begin) / (1 - begin)
    if name == "cosine":
        remaining = (1 + math.cos(math.pi * share)) / 2
    else:
        remaining = math.pow(1 - share, numbers[0] if name == "poly" else 1)
    return minimum + (peak - minimum) * remaining


def set_learning_rate(optimizer: "Optimizer", rate: float) -> None:
    """Set the learning rate of all groups of parameters; a group with an "lr_scale" gets its multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def parse_schedule(text: str) -> tuple[str, list[float]]:
    """Return the name of a schedule and its numbers.

    Raises:
        UsageError: no such schedule. The message suggests a similar one.
    """
    name, colon, values = text.partition(":")
    try:
        numbers = [float(value) for value in values.split(",")] if colon else [0.2] * (name == "wsd")
    except ValueError:
        numbers = [math.nan]
    fits = {
        "cosine": not numbers and not colon,
        "step": len(numbers) == 2 and 0 < numbers[0] < math.inf and 0 < numbers[1] < 1,
        "poly": len(numbers) == 1 and 0 < numbers[0] < math.inf,
        "wsd": len(numbers) == 1 and 0 < numbers[0] <= 1,
    }
    if not fits.get(name, False):
        near = difflib.get_close_matches(name, SCHEDULES, n=1) or SCHEDULES
        raise UsageError(
            "--schedule must be cosine, step:EPOCHS,FACTOR with a FACTOR below 1, poly:POWER, or wsd:SHARE up to 1, "
            f"not {text}: try {' or '.join(SCHEDULES[schedule] for schedule in near)}"
        )
    return name, numbers
