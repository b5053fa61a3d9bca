"""The worker groups of a run: which one trains, how the last one ended, and when the next one may start."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raydali.launch.driver.pending_resources import PendingResources
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.run.events import Failure, GroupEnded, StuckRank, WorkerAddress
from raydali.run.messages import Message, WorkerError, WorkerMessage

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel

LOOK_SECONDS = 10.0
"""Interval between two looks at whether the nodes that are not left out suffice."""


class WorkerGroups:
    """Follows the worker groups, and permits the controller to start the next one.

    Args:
        channel: whose board holds the permission.
        policy: decides about failures.
        pending: reports what workers wait for while they do not run.
        describe_deaths: see `deaths.describe_deaths`.

    Attributes:
        errors: errors reported by the current worker group, or by the last one that failed, oldest first.
        failure: that failure as Ray Train describes it; empty for none.
        stop_reason: why the run must end although Ray Train would start it again; None while it may go on.
        training: whether a group has completed its first step.
        has_left: whether the workers have saved a checkpoint and left.
        step: the last one that is known to be completed.
    """

    def __init__(
        self,
        channel: "DriverChannel",
        policy: RestartPolicy,
        pending: PendingResources,
        describe_deaths: Callable[[Sequence[int], Mapping[int, WorkerAddress], str, Collection[WorkerAddress]], str],
    ) -> None:
        self.errors: list[WorkerError] = []
        self.failure = ""
        self.stop_reason: str | None = None
        self.training = self.has_left = False
        self.step = 0
        self._channel, self._policy, self._pending = channel, policy, pending
        self._describe_deaths = describe_deaths
        self._group, self._ended_groups = "", set[str]()
        self._is_over = False
        self._permit: tuple[float, int] | None = None
        self._hung: set[WorkerAddress] = set()
        self._look_at = 0.0

    def is_outdated(self, message: Message) -> bool:
        """Return whether a message comes from a group that has ended."""
        if not isinstance(message, WorkerMessage):
            return False
        if message.group in self._ended_groups:
            return True
        self._group = message.group
        return False

    def started(self, step: int) -> None:
        """A group has completed its first step, which began at `step`."""
        self.training, self.has_left = True, False
        self._channel.write(training=True, left=False)
        self.errors, self.failure, self._is_over = [], "", False
        self._policy.group_started(step)
        self._pending.stop()

    def learnt(self) -> None:
        """The workers have found a broken sample, and will not fail because of it again."""
        self._policy.made_progress()

    def left(self) -> None:
        """The workers have saved a checkpoint and left."""
        self.has_left = True
        self._channel.write(left=True)

    def add_error(self, error: WorkerError) -> None:
        """Keep an error; the first one of a new group replaces those of the last."""
        if self._is_over:
            self.errors, self._is_over = [], False
        self.errors.append(error)
        if error.final:
            self.stop_reason = "it would recur"

    def hung(self, ranks: Sequence[StuckRank]) -> None:
        """Remember ranks that are killed because they hold up the run."""
        self._hung |= {(each.node_id, each.pid) for each in ranks}

    def ended(self, end: GroupEnded) -> GroupEnded:
        """Decide what follows the end of a group; return it with the event to record."""
        self.training = False
        self._ended_groups |= {self._group} - {""}
        self._group, self._is_over = "", True
        if not isinstance(end, Failure):
            self._permit_after(0.0, end)
            return end
        if end.killed and self.stop_reason is None:  # the others only report that it is gone
            self.errors = []
        decision = self._policy.failed(end, self.errors)
        self.stop_reason = self.stop_reason or decision.stop_reason
        self._permit_after(decision.pause, end)
        self.failure = end.error
        if end.killed:
            self.failure = self._describe_deaths(end.killed, end.places, end.error, self._hung)
        return replace(
            end,
            error=self.failure,
            step=self.step,
            pause=decision.pause,
            cause=decision.cause,
            nodes=sorted({node_id[:8] for node_id, _ in end.places.values()}),
            left_out=[node_id[:8] for node_id in decision.leave_out],
        )

    def _permit_after(self, pause: float, end: GroupEnded) -> None:
        self._permit = time.monotonic() + pause, end.number
        self.permit_start()

    def permit_start(self) -> None:
        """Let the controller start the next group, once the pause before it is over."""
        if self._permit is None or self.stop_reason is not None or time.monotonic() < self._permit[0]:
            return
        self._channel.write(permitted=self._permit[1], left_out=self._policy.left_out, training=False, left=False)
        self._pending.start()
        self._permit = None

    def takes_nodes_back(self) -> bool:
        """Use the nodes again that were left out, if the others do not suffice by now; return whether this is so.

        Workers that wait for their places are looked at every few seconds: Ray hears of a lost node later.
        """
        if self.training or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_SECONDS
        if not self._policy.take_back():
            return False
        self._channel.write(left_out=())
        return True
