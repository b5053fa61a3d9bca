"""The finished steps of a run: each rank writes a row when it has updated its weights, the same for all contenders.

The number of the step is in the optimizer's state, beside the momenta. So it comes from a checkpoint or from another
rank as they do, and a step that is done again has the same number.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from raydali.train.models.small_images import digits_network

FOLDER = "RAYDALI_GOODPUT"
"""The environment variable with the folder of the rows."""


TAIL_BYTES = 256
"""More than two rows have."""


@dataclass(frozen=True)
class FinishedStep:
    """A step that a rank has finished.

    Attributes:
        time: seconds since 1970.
        step: number of the step, from 1.
        participants: number of ranks whose gradients are in the step; 0 if this is not known.
    """

    time: float
    rank: int
    step: int
    participants: int = 0


def model(num_classes: int) -> nn.Sequential:
    """Return the network of the built-in digits, and record the steps of this process."""
    record_steps()
    return digits_network(num_classes)


@cache
def record_steps(participants: Callable[[], int] = lambda: 0) -> None:
    """Record each step of an optimizer in this process, a rank of Ray Train, from now on."""
    import ray.train

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not optimizer.param_groups[0]["lr"]:  # a warm-up step, which is undone
            return
        state = next(iter(optimizer.state.values()))
        state["steps"] = state.get("steps", torch.zeros(())) + 1
        rank = ray.train.get_context().get_world_rank()
        with Path(os.environ[FOLDER], str(os.getpid())).open("a") as file:
            file.write(f"{time.time()} {rank} {int(state['steps'])} {participants()}\n")

    register_optimizer_step_post_hook(record)


def newest_step(folder: Path) -> int:
    """Return the highest number of a finished step; 0 if there is none. It reads little, so that no rank is slower."""
    highest = 0
    for file in folder.iterdir():
        with file.open("rb") as rows:
            rows.seek(max(0, file.stat().st_size - TAIL_BYTES))
            complete = rows.read().rpartition(b"\n")[0].splitlines()
        highest = max(highest, int(complete[-1].split()[2]) if complete else 0)
    return highest


def finished_steps(folder: Path) -> list[FinishedStep]:
    """Return the rows of all ranks by time; a last line without its end is left out."""
    rows = [line.split() for file in folder.iterdir() for line in file.read_text().splitlines(True) if line[-1] == "\n"]
    return sorted(
        (FinishedStep(float(at), int(rank), int(step), int(ranks)) for at, rank, step, ranks in rows),
        key=lambda row: row.time,
    )
