"""The worker groups of a run, one after the other: when one starts, with how many workers, and how it has ended."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydali.launch import trainer
from raydali.launch.driver.group_size import GroupSize
from raydali.launch.driver.pending_resources import PendingResources
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.run.events import Failure, GroupEnded, Resize, StuckRank, WorkerAddress
from raydali.run.messages import Heartbeat, Message, Placed, WorkerError, WorkerMessage

if TYPE_CHECKING:
    from raydali.launch.channel import Call, DriverChannel

LOOK_SECONDS = 10.0
"""Interval between two looks at whether the nodes that are not left out suffice."""
REQUEST_SECONDS = 60.0
"""Interval at which workers that are missing are requested of the autoscaler, which forgets a request after 180 s."""
LEAVE_SECONDS = 30.0
"""Time in which workers save a checkpoint and leave before a resize."""


class WorkerGroups:
    """Starts worker groups, and follows them.

    Args:
        channel: in whose process Ray Train works.
        training, task: see `trainer.fit`.
        size: chooses the number of workers.
        policy: decides about failures.
        pending: reports what workers wait for while they do not run.
        describe_deaths: see `deaths.describe_deaths`.
        start_timeout: seconds from the placement of a group to the start of its workers, for the message.
        requester: the id of requests to the autoscaler; empty for none.

    Attributes:
        errors: errors reported by the current worker group, or by the last one that failed, oldest first.
        failure: that failure as Ray Train describes it; empty for none.
        stop_reason: why no further group starts; None while the run may go on.
        finished: whether training is over.
        training: whether a group has completed its first step.
        has_left: whether the workers have saved a checkpoint and left.
        step: the last one that is known to be completed.
    """

    def __init__(
        self,
        channel: "DriverChannel",
        training: trainer.Training,
        task: Mapping[str, Any],
        size: GroupSize,
        policy: RestartPolicy,
        pending: PendingResources,
        describe_deaths: Callable[[Sequence[int], Mapping[int, WorkerAddress], str, Collection[WorkerAddress]], str],
        start_timeout: float = 0.0,
        requester: str = "",
    ) -> None:
        self.errors: list[WorkerError] = []
        self.failure = ""
        self.stop_reason: str | None = None
        self.finished = self.training = self.has_left = False
        self.step = 0
        self._channel, self._training, self._task, self._requester = channel, training, task, requester
        self._size, self._policy, self._pending, self._describe_deaths = size, policy, pending, describe_deaths
        self._running: Call[trainer.GroupEnd] | None = None
        self._workers = 0
        self._places: dict[int, WorkerAddress] = {}
        self._group, self._ended_groups = "", set[str]()
        self._is_over = self._stops = False
        self._start_at = self._look_at = self._request_at = 0.0
        self._resize_to: int | None = None
        self._leave_until = float("inf")
        self._start_timeout, self._is_late = start_timeout, False
        self._hung: set[WorkerAddress] = set()

    @property
    def placed(self) -> int:
        """Number of workers of the group that has its places; 0 without one."""
        return self._workers if self._running is not None and self._pending.is_over else 0

    def start(self) -> Placed | None:
        """Start the next group if it is time to, and there is room for it; return what the console says about it."""
        if self._running is not None or self._stops or self.finished or self.stop_reason is not None:
            return None
        left_out = self._policy.left_out
        workers = self._size.of_next(left_out) if time.monotonic() >= self._start_at else None
        if workers is None:
            self._request(0)
            return None
        missing, self._request_at = self._size.missing(workers), time.monotonic() + REQUEST_SECONDS
        seconds = self._size.placement_seconds(workers)
        facts = self._training, self._task, workers, left_out, seconds, self._requester, missing
        self._running, self._workers, self._places = self._channel.call(trainer.fit, *facts), workers, {}
        return Placed(workers, workers + missing) if missing else None

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the group for at most this time, or without a group just this time.

        Returns:
            Whether the group has ended.
        """
        if self._running is not None:
            return self._running.has_returned(seconds)
        time.sleep(seconds)
        return False

    def take_end(self) -> GroupEnded | None:
        """Return the early end of the group if it has ended, which `ended` must be told.

        Raises:
            RayError: the process of the channel has died.
        """
        if self._running is None or not self._running.has_returned():
            return None
        end = self._running.result()
        resize_to, is_late = self._resize_to, self._is_late
        self._running, self._resize_to, self._leave_until, self._is_late = None, None, float("inf"), False
        self._size.ended(placed=end != "not placed")
        if end == "finished":
            self.finished = True
            return None
        if resize_to is not None:
            self._channel.notify(None)
            return Resize(workers=resize_to)
        if isinstance(end, str):
            return None
        if is_late and isinstance(end, Failure):
            late = f"a worker was not ready within {self._start_timeout:g} s (--start-timeout)"
            return replace(end, error=late, starting=True)
        if end.killed is None:
            return end
        return replace(end, places={rank: self._places[rank] for rank in end.ranks if rank in self._places})

    def grow(self) -> None:
        """Let a group that trains leave for a larger one, if there is room; end it if it does not leave in time."""
        if time.monotonic() > self._leave_until:
            trainer.remove_places()
            self._leave_until = float("inf")
        if not self.training or self._running is None or self._resize_to is not None or self._stops:
            return
        self._resize_to = self._size.of_larger(self._workers, self._policy.left_out)
        if self._resize_to is not None:
            self._channel.notify("resize")
            self._leave_until = time.monotonic() + LEAVE_SECONDS
        self._request(self._workers)

    def stop(self) -> None:
        """Ask the workers to save a checkpoint and leave, and start no others."""
        self._stops = True
        self._channel.notify("stop")

    def end_late(self) -> None:
        """End a group that was not ready in time."""
        self._is_late = True
        trainer.remove_places()

    def _request(self, workers: int) -> None:
        """Request nodes of the autoscaler for the workers that a group of this size lacks."""
        if self._requester and time.monotonic() >= self._request_at:
            self._request_at = time.monotonic() + REQUEST_SECONDS
            missing = self._size.missing(workers)
            self._channel.call(trainer.request_workers, self._training, self._requester, missing, self._policy.left_out)

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
        self._size.started()
        self.errors, self.failure, self._is_over = [], "", False
        self._policy.group_started(step)
        self._pending.stop()

    def learnt(self) -> None:
        """The workers have found a broken sample, and will not fail because of it again."""
        self._policy.made_progress()

    def left(self) -> None:
        """The workers have saved a checkpoint and left."""
        self.has_left = True

    def heartbeat(self, message: Heartbeat) -> None:
        """Note where a rank runs."""
        self._places[message.rank] = message.node_id, message.pid

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
            self._start_after(0.0)
            return end
        if end.killed and self.stop_reason is None:  # the others only report that it is gone
            self.errors = []
        decision = self._policy.failed(end, self.errors)
        self.stop_reason = self.stop_reason or decision.stop_reason
        self._start_after(decision.pause)
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

    def _start_after(self, pause: float) -> None:
        self._start_at, self._request_at = time.monotonic() + pause, 0.0
        self._pending.start(pause)

    def takes_nodes_back(self) -> bool:
        """Use the nodes again that were left out, if the others do not suffice by now; return whether this is so.

        Workers that wait for their places are looked at every few seconds: Ray hears of a lost node later.
        """
        if self.training or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._policy.take_back()
