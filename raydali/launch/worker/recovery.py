"""A change of ranks in place: all members agree on the step, and share the state and the micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.optim import Optimizer

from raydali.data.loading.loader import Loader
from raydali.data.stream.assignment import Assignment, Change
from raydali.host import start_clock
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.checkpointing import Stateful
from raydali.train.batchnorm import RunningStatistics
from raydali.train.checkpoint_file import State
from raydali.train.membership import Membership, NotReplacedError, RankLostError
from raydali.train.optim import load_optimizer
from raydali.train.snapshot import snapshot
from raydali.train.step_counts import JOINS
from raydali.train.worker import Worker

_NOTHING = -1
"""The step of a rank that joins."""


class Recovery:
    """The recovery of a rank from changes of ranks, in the all-reduce of a step.

    Where a member has finished the step, its state is that of all, and all go on with the next one. Otherwise they keep
    their gradients of this step, and train on the lost ranks' micro-batches, too.

    Before calls outside of steps, as those of a validation or a checkpoint, ranks wait until all have finished the same
    step. If a rank is lost in such a call, the others do all calls since that step again, with the rank that replaces
    it: it validates the lost rank's share. Then they go on with the call that the loss has interrupted. Some may have
    begun the next step before; they do so, too. Not between warm-up steps of two epochs, nor when ranks leave.

    If a rank is lost in the warm-up steps before the first step, the others go on with theirs, and agree in that step.

    Args:
        worker: this rank.
        membership: it hears of changes.
        parts: the parts of the run's state, by their names in checkpoints.
        run: what only a replacement takes over.
        statistics: the model's running statistics, which ranks share in each step.
        broken: the broken samples, and those that may have crashed a rank; None if nothing is known of any.

    Attributes:
        assignment: what this rank's loader loads, once it does.
    """

    def __init__(
        self,
        worker: Worker,
        membership: Membership,
        parts: Mapping[str, Stateful],
        run: Stateful,
        statistics: RunningStatistics,
        broken: BrokenSamples | None = None,
    ) -> None:
        self._worker, self._membership = worker, membership
        self._parts, self._run, self._statistics = {**parts, "counts": worker.counts}, run, statistics
        self._broken = broken
        self.assignment: Assignment[Any]
        self._finished: int | None = None
        self._begun: int | None = None
        self._next: int | None = None
        self._ends_epoch = False
        self._before_calls: State = None
        worker.before_call, worker.after_loss = self.settle, self._replaced

    def begin_step(self, step: int) -> int:
        """Admit ranks that join, and return the number of micro-batches of a global batch that this rank trains on."""
        self._finished, counts = None, self._worker.counts
        if counts.sums[JOINS]:
            self._admit(step)
        counts.mine[JOINS] = self._membership.asking
        return self.micro_batches(step)

    def _admit(self, step: int) -> None:
        self._membership.admit(first=self._worker.rank == 0)
        self.recover(step)

    def await_replacements(self, step: int, gives_up: Callable[[], bool]) -> bool:
        """Wait before a step until lost ranks are replaced, and return True; or False if nobody does that any more.

        This rank does not wait if others have already begun the step without waiting. See `wait_until_complete` for
        `gives_up`.
        """
        if not self._membership.is_complete and self._begun != step:
            if not self._membership.wait_until_complete(gives_up):
                return False
            self._admit(step)
        return True

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a global batch that this rank trains on."""
        return len(self.assignment.of_step(step))

    def end_step(self, step: int, *, ends_epoch: bool) -> None:
        """Note that this rank has finished a step. At the end of an epoch, wait until lost ranks are replaced.

        Raises:
            NotReplacedError: nobody replaces them any more.
        """
        self._finished, self._next, self._ends_epoch = step, step + 1, ends_epoch
        self._before_calls = None
        self._worker.done_calls.clear()
        if ends_epoch:
            self.settle()
            if not self._membership.is_complete:
                self._complete(step + 1)
                self.recover(step + 1, settles=True)

    def _complete(self, step: int) -> None:
        """Wait until lost ranks are replaced, and admit the replacements; `recover` is next."""
        if not self._membership.wait_until_complete():
            raise NotReplacedError(f"lost ranks are not replaced at the end of step {step - 1}")
        self._membership.admit(first=self._worker.rank == 0)

    def settle(self) -> None:
        """Wait until all members have finished the step that this rank has, unless they are known to have."""
        if self._finished is None:
            return
        step, self._finished = self._finished + 1, None
        self._before_calls = {"run": self._run.state_dict(), "counts": self._worker.counts.state_dict()}
        try:
            self._meet()
        except RankLostError:
            self.recover(step, settles=True)

    def _meet(self) -> None:
        self._worker.all_reduce(torch.zeros(1, device=self._worker.device))

    def end_calls(self) -> None:
        """Note that a loss before the end of the next step ends the process group."""
        self._next = None

    def _replaced(self) -> bool:
        """Go on after a loss in a call outside of steps. Return whether this call can be done again."""
        if self._next is None:
            return False
        self.recover(self._next, settles=True)
        return True

    def recover(self, step: int, *, settles: bool = False) -> bool:
        """Agree with the other members, and share what lost ranks had to do. All members must call it.

        Args:
            step: the step that this rank has not finished.
            settles: whether it has not begun it either, since other things follow the last one.

        Returns:
            True if another rank has finished this step; this rank now has the state after it.

        Raises:
            NotReplacedError: an epoch has ended, and nobody replaces lost ranks any more.
        """
        while True:
            newest, changes, some_settle = self._agree(step, settles, self.assignment.pause(), self.assignment.changes)
            self.assignment.resume(changes)
            if newest > step or not some_settle:
                return newest > step
            try:
                self._meet()
                if self._ends_epoch and not self._membership.is_complete:
                    self._complete(step)
                    continue
                for call in self._worker.done_calls:
                    self._worker.guarded(call)
            except RankLostError:
                continue
            return False

    def join(self, loader: Loader, *others: Loader, on_wait: Callable[[], None]) -> tuple[int, bool]:
        """Join the others in the place of a lost rank, with their state. A spare waits until one is lost.

        Args:
            loader: the loader of the training set, which begins where the others leave micro-batches to this rank.
            others: other loaders, which get this rank, too.
            on_wait: called if no rank is lost yet.

        Returns:
            The step that comes next, and whether other things follow the step before, which are to be done first.

        Raises:
            NotReplacedError: nobody may join any more, for example since the run is over.
        """
        if self._membership.ask(on_wait):
            start_clock.restart()
        self._membership.join()
        start_clock.mark("join")
        for each in (loader, *others):
            each.rank = self._membership.rank
        step, changes, settles = self._agree(_NOTHING, False, 0, [])
        loader.start, loader.changes = changes[-1].loaded, changes
        if loader.device.type == "cuda":
            for each in (loader, *others):
                each.begin_ahead()  # instead of what the rehearsal has begun, in the same pipeline
        return step, settles

    def _agree(self, step: int, settles: bool, loaded: int, known: Sequence[Change]) -> tuple[int, list[Change], bool]:
        while True:
            report = {"step": step, "settles": settles, "loaded": loaded, "changes": [*map(astuple, known)]}
            report["suspects"] = self._broken.suspects() if self._broken is not None else {}
            reports, groups = self._membership.agree(report)
            if self._broken is not None:
                self._broken.suspect(each["suspects"] for each in reports)
            members = self._membership.members
            self._worker.regroup(members.index(self._membership.rank), len(members), groups)
            steps = [each["step"] for each in reports]
            newest = max(steps)
            if newest == _NOTHING:
                raise NotReplacedError("all ranks were lost before this one had their state")
            try:
                if min(steps) < newest:
                    before = self._before_calls if any(each["settles"] for each in reports) else None
                    source = steps.index(newest)
                    self._share_state(source, before, takes=step < newest, joins=step == _NOTHING)
                    step = newest
                break
            except RankLostError:
                continue
        # Members that a further change has interrupted here know of fewer changes than others.
        known = max(([_change(*facts) for facts in each["changes"]] for each in reports), key=len)
        begun = max([newest, *(each["loaded"] for each in reports), *(change.loaded for change in known)])
        joined = [rank for rank, step in zip(members, steps, strict=True) if step == _NOTHING]
        changes = [*known, _change(sorted(members), newest, begun, joined)]
        self._worker.counts.sums[JOINS] = 0
        has_begun = any(each["step"] == newest and not each["settles"] for each in reports)
        self._begun = newest if has_begun else None
        return newest, changes, any(each["settles"] for each in reports)

    def end(self) -> None:
        """Let spares end, after the last step of the run."""
        self._membership.end()

    def _share_state(self, source: int, before: State, *, takes: bool, joins: bool) -> None:
        """Send the state of one rank after its last update to all.

        Args:
            source: the rank.
            before: of what calls since then have changed, the state before them; None if it has not changed.
            takes: whether this rank takes it over.
            joins: whether it also takes over what only a replacement does.
        """
        state: State = None
        if self._worker.rank == source:
            with self._statistics.before_step():
                parts = snapshot({name: part.state_dict() for name, part in self._parts.items()})
            state = {"parts": parts, "run": self._run.state_dict()}
            if before is not None:
                state = {"parts": {**parts, "counts": before["counts"]}, "run": before["run"]}
        state = self._membership.call(lambda: self._worker.state_from_first(state, source))
        if takes:
            for name, part in self._parts.items():
                if isinstance(part, Optimizer):
                    load_optimizer(part, state["parts"][name])
                else:
                    part.load_state_dict(state["parts"][name])
            self._statistics.discard_step()
        if joins:
            self._run.load_state_dict(state["run"])


def _change(members: Sequence[int], step: int, loaded: int, joined: Sequence[int]) -> Change:
    return Change(tuple(members), step, loaded, tuple(joined))
