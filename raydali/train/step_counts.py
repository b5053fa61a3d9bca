"""Counts that all ranks know as sums one step later, so that all decide alike, and no rank waits for another one."""

from collections.abc import Callable
from typing import Any

import torch

NOTICES, BROKEN, JOINS = "notices", "broken", "joins"
_NAMES = NOTICES, BROKEN, JOINS


class StepCounts:
    """The counts of one rank, and their sums over all ranks.

    The all-reduce of a step's gradients also sums the counts, see `taken` and `set_sums`. If there is none outside of
    the backward pass, `begin_step` begins another all-reduce, and `end_step` waits for it.

    Attributes:
        mine: this rank's counts by name, which their owners set between two steps.
        sums: the sums over all ranks of what they had at the beginning of the newest step.
        of_epoch: the loss of all ranks, added up over images, and their images, (2,); both in the epoch so far, also
            of ranks that are lost. They stay zero if the all-reduce of gradients does not sum them.
    """

    def __init__(self) -> None:
        self.mine = dict.fromkeys(_NAMES, 0)
        self.sums = dict.fromkeys(_NAMES, 0)
        self.of_epoch = torch.zeros(2, dtype=torch.float64)
        self._pending: tuple[torch.Tensor, Callable[[], None]] | None = None

    def taken(self, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's counts as a tensor of this dtype and device."""
        counts = torch.tensor([*self.mine.values()], dtype=like.dtype, pin_memory=like.is_cuda)
        return counts.to(like.device, non_blocking=True)

    def set_sums(self, sums: torch.Tensor) -> None:
        """Set the sums of what all ranks have `taken`."""
        self.sums = dict(zip(_NAMES, map(round, sums.tolist()), strict=True))

    def begin_step(self, sum_later: Callable[[torch.Tensor], Callable[[], None]]) -> None:
        """Begin to sum the counts with `Worker.sum_later`."""
        counts = torch.tensor([*self.mine.values()])
        self._pending = counts, sum_later(counts)

    def end_step(self) -> None:
        """Wait for the sums, if `begin_step` has begun to sum."""
        if self._pending is not None:
            (counts, wait), self._pending = self._pending, None
            wait()
            self.set_sums(counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, for a rank that takes over the state of this one."""
        return {"sums": dict(self.sums), "of_epoch": self.of_epoch.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the sums of another rank."""
        self.sums, self.of_epoch = dict(state["sums"]), state["of_epoch"].clone()
