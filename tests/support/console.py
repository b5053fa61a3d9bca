"""What the tests of the console show, and what they expect of it."""

import re
from collections.abc import Callable
from typing import Any

from raydali.run.messages import Progress

Output = Callable[[], str]
"""Returns what was printed since the last call."""
RECORD: dict[str, Any] = {
    "epoch": 3,
    "images": 1281167,
    "images_per_second": 6234.4,
    "of_ceiling": 0.9126,
    "loader_wait_fraction": 0.0123,
    "loss": 2.71828,
    "learning_rate": 0.05,
    "validation": {"images": 50000, "loss": 1.5, "top1": 0.7613, "top5": 0.9287, "seconds": 12.0},
    "seconds": 205.5,
    "verdict": None,
}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def progress(step: int, samples_consumed: int, epoch: int = 0, epochs: int = 0) -> Progress:
    return Progress(step=step, steps=400, epoch=epoch, epochs=epochs, samples_consumed=samples_consumed)
