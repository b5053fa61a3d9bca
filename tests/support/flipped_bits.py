"""A planted fault: the device of one rank flips a bit of a weight or of a momentum after a step."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.training.checkpoint_file import local

Where = Literal["weight", "momentum"]


def flip(optimizer: Optimizer, where: Where) -> None:
    """Flip a bit of the first weight of which this rank has a part, or of its momentum."""
    weight = next(each for each in optimizer.param_groups[0]["params"] if local(each).numel())
    tensor = local(weight.detach() if where == "weight" else optimizer.state[weight]["momentum_buffer"])
    tensor.view(torch.int32)[(0,) * tensor.dim()] ^= 1 << 20


def plant(session: Session, *, rank: int, step: int, where: Where, once: Path | None = None) -> None:
    """Plant the fault in this process, after the step of this index; with a file, only once for all processes."""
    update = Step.update

    def faulty(self: Step, optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
        update(self, optimizer, *arguments, **options)
        is_here = (session.worker.rank, self.index, self.is_warm_up) == (rank, step, False)
        if is_here and not (once is not None and once.exists()):
            flip(optimizer, where)
            if once is not None:
                once.touch()

    Step.update = faulty  # type: ignore[method-assign]
