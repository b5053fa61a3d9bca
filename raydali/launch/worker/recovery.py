"""The survivors of a loss of ranks go on in place: they agree on the step, share the state and the micro-batches."""

from collections.abc import Mapping
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch
from torch.optim import Optimizer

from raydali.data.stream.assignment import Assignment, Loss
from raydali.launch.worker.checkpointing import Stateful
from raydali.train.batchnorm import RunningStatistics
from raydali.train.checkpoint_file import State
from raydali.train.membership import Membership, RankLostError
from raydali.train.optim import load_optimizer
from raydali.train.snapshot import snapshot
from raydali.train.worker import Worker

TIMEOUT = timedelta(minutes=30)
"""PyTorch's default timeout of calls with gloo."""


class Recovery:
    """The recovery of a rank from losses of others, in the all-reduce of a step.

    Where a survivor has finished the step, its state is that of all, and all go on with the next one. Otherwise they
    keep their gradients of this step, and train on the lost ranks' micro-batches, too. The last step of an epoch is
    settled: all have finished it before one goes on. Nothing else recovers: a loss during validation, checkpoints or
    warm-up steps ends the process group.

    Args:
        worker: this rank, whose `membership` hears of losses.
        assignment: what this rank's loader loads.
        parts: the parts of the run's state, by their names in checkpoints.
        statistics: the model's running statistics, which ranks share in each step.
    """

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        assignment: Assignment[Any],
        parts: Mapping[str, Stateful],
        statistics: RunningStatistics,
    ) -> None:
        self._worker, self._membership, self._assignment = worker, membership, assignment
        self._parts, self._statistics = parts, statistics

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a global batch that this rank trains on."""
        return len(self._assignment.of_step(step))

    def settle(self, step: int) -> None:
        """Wait until all remaining ranks have finished a step, which this rank has. All of them must call it."""
        while True:
            try:
                self._worker.all_reduce(torch.zeros(1, device=self._worker.device))
            except RankLostError:
                self.recover(step + 1)
            else:
                return

    def recover(self, step: int) -> bool:
        """Agree with the other survivors, and share what lost ranks had to do. All survivors must call it.

        Args:
            step: the step that this rank has not finished.

        Returns:
            True if another rank has finished this step; this rank now has the state after it.
        """
        known, loaded, behind = self._assignment.losses, self._assignment.pause(), False
        while True:
            report = {"step": step + behind, "loaded": loaded, "losses": [astuple(loss) for loss in known]}
            reports, group = self._membership.agree(report, TIMEOUT)
            members = self._membership.members
            self._worker.regroup(members.index(self._membership.rank), len(members), group)
            steps = [each["step"] for each in reports]
            try:
                if min(steps) < max(steps):
                    self._share_state(steps.index(max(steps)), loads=step + behind < max(steps))
                    behind = step < max(steps)
                break
            except RankLostError:
                continue
        # Survivors that a further loss has interrupted here know of fewer losses than others.
        known = max(([Loss(tuple(m), s, e) for m, s, e in each["losses"]] for each in reports), key=len)
        begun = max([max(steps), *(each["loaded"] for each in reports), *(loss.loaded for loss in known)])
        self._assignment.resume([*known, Loss(members, max(steps), begun)])
        return behind

    def _share_state(self, source: int, *, loads: bool) -> None:
        """Send the state of one rank after its last update to all.

        Args:
            source: the rank.
            loads: whether this rank loads it.
        """
        state: State = None
        if self._worker.rank == source:
            with self._statistics.before_step():
                state = snapshot({name: part.state_dict() for name, part in self._parts.items()})
        state = self._membership.call(lambda: self._worker.state_from_first(state, source))
        if loads:
            for name, part in self._parts.items():
                if isinstance(part, Optimizer):
                    load_optimizer(part, state[name])
                else:
                    part.load_state_dict(state[name])
            self._statistics.discard_step()
