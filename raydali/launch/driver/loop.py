"""The driver's loop over worker groups: start one, follow it to its end, decide what comes after it, again."""

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import ray

from raydali.errors import SupersededError
from raydali.host.interrupts import Interrupt
from raydali.launch import trainer
from raydali.launch.channel import Call
from raydali.launch.driver import hang_detection
from raydali.launch.driver.endings import driver_error, final_error, resume_hint, silence_ray
from raydali.launch.driver.group_size import GroupSize, Waiting
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.placement import Placement
from raydali.launch.driver.ray_cluster import ConnectedRay
from raydali.launch.driver.recorder import RunRecorder
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.worker_group import WorkerGroup
from raydali.launch.job import WorkerTask
from raydali.launch.trainer import GroupEnd
from raydali.report.console import Console
from raydali.report.html import text
from raydali.run import events, messages
from raydali.run.early_end import GO_ON
from raydali.text import error_line

POLL_SECONDS = 0.2
LEAVE_SECONDS = 20
"""How long an interrupted driver waits for the workers' last checkpoint; Kubernetes gives 30 s."""
RESIZE_SECONDS = 30.0
"""Time in which workers save a checkpoint and leave before a resize."""
REQUEST_SECONDS = 60.0
"""Interval at which workers that are missing are requested of the autoscaler, which forgets a request after 180 s."""
ANSWER_SECONDS = 2.0
"""How long a driver whose run has finished waits until its request is taken back."""
OWN_NODE_SECONDS = 1.0
"""Interval between two looks at whether the driver's own node is about to be taken away."""
DRAINING = "interrupted, since the driver's node is about to be taken away"


def train_in_workers(
    task: WorkerTask,
    placement: Placement,
    cluster: ConnectedRay,
    console: Console,
    track: Callable[[Mapping[str, Any]], None],
    interrupt: Interrupt,
) -> None:
    """Train in Ray Train workers until the end; show and record what happens.

    Args:
        task: what the workers do.
        placement: how many there are, and what each reserves.
        cluster: where they run.
        console: shows messages.
        track: takes the record of each epoch.
        interrupt: requests the end of the run.

    Raises:
        TrainingError: workers failed more often than `max_failures`, or in a way that would recur, or the driver did.
        UsageError: a worker found that the options cannot be used.
        KeyboardInterrupt: it was interrupted; workers that trained have saved a checkpoint.
    """
    folder, recorder = task.folder, RunRecorder(task, track, console)
    driver = Driver(task, placement, cluster, recorder, interrupt)
    event: events.Event = events.RunFinished()
    error: BaseException | None = None
    try:
        driver.train()
        if driver.early_end is not None:
            event = events.RunEndedEarly(why=driver.early_end)
    except SupersededError:
        raise
    except KeyboardInterrupt:
        event, error = events.RunInterrupted(why=interrupt.why), KeyboardInterrupt(interrupt.why)
        recorder.background.calls.put(lambda: setattr(error, "args", (resume_hint(folder),)))
    except Exception as stopped:  # if nobody has stopped the run, of Ray: one of its processes has died on this node
        error = stopped if driver.stop_reason is not None else driver_error(stopped, folder)
        event = events.RunStopped(error=error_line(error), why=driver.stop_reason)
    finally:
        console.close()
    recorder.close(event, driver.group, interrupt.again)
    if error is not None:
        raise error
    if (message := text.beside_published(recorder.report.history)) is not None:
        console.print(message)
    if driver.early_end is not None:
        console.print(f"ended early: {driver.early_end}; {GO_ON}")
    ended = "finished" if driver.early_end is None else "ended"
    console.print(": ".join(filter(None, [ended, str(folder), text.last_and_best(recorder.report.history)])))


class Driver:
    """The loop, and everything that the driver watches meanwhile.

    Args:
        task, placement, cluster, interrupt: see `train_in_workers`.
        recorder: records and shows what happens.

    Attributes:
        group: the newest worker group.
        stop_reason: why no further group may start; None while the run may go on.
        early_end: why the run has ended before its last epoch; None if it has not.
    """

    def __init__(
        self,
        task: WorkerTask,
        placement: Placement,
        cluster: ConnectedRay,
        recorder: RunRecorder,
        interrupt: Interrupt,
    ) -> None:
        silence_ray()
        self.stop_reason: str | None = None
        self.early_end: str | None = None
        self._options, self._placement, self._cluster = task.options, placement, cluster
        self._recorder, self._interrupt = recorder, interrupt
        self._channel, self._task = task.channel, ray.put(task)
        resources = {"CPU": placement.cpus} | ({"GPU": 1} if placement.gpu else {})
        self._training = trainer.Training(
            name=task.folder.name,
            workers=placement.reachable,
            resources=resources,
            timeout=task.options.group_timeout,
        )
        self._size = GroupSize(placement, cluster.look)
        self._policy = RestartPolicy(task.options.max_failures, task.options.storage_timeout, self._suffices)
        self._waiting = self._new_wait()
        self._waiting.is_over = cluster.own  # it has what its workers need
        self.group: WorkerGroup | None = None
        self._groups = self._step = 0
        self._start_at = self._request_at = self._own_node_at = 0.0
        self._requester, self._requested = f"raydali-{uuid.uuid4().hex}", 0

    def train(self) -> None:
        """Train one worker group after the other, and return once training is over.

        Raises:
            TrainingError, UsageError: no further group may start.
            KeyboardInterrupt: the end of the run was requested, and workers that trained have left.
            RayError: the process of the channel has died.
        """
        try:
            while True:
                self.group = group = self._start(self._wait_for_room())
                end = self._follow(group)
                self._recorder.ledger.released(group, finished=end == "finished")
                if end == "finished":
                    break
                self._decide(group, end)
        except KeyboardInterrupt:
            self._leave()
            raise
        self._request_at = 0.0
        if (request := self._request(0)) is not None:
            request.has_returned(ANSWER_SECONDS)

    def _wait_for_room(self) -> int:
        """Wait until the next group may start, and return its size."""
        while True:
            workers = self._size.of_next(self._policy.left_out) if time.monotonic() >= self._start_at else None
            if workers is not None:
                return workers
            self._request(self._placement.reachable)
            self._tick()
            time.sleep(POLL_SECONDS)

    def _start(self, workers: int) -> WorkerGroup:
        missing = self._size.missing(workers)
        if missing:
            self._take(messages.Placed(workers, workers + missing), time.time())
        self._request_at = 0.0
        self._request(missing)
        self._groups, self.early_end = self._groups + 1, None
        number, seconds = str(self._groups), self._size.placement_seconds(workers)
        task = {"task": self._task, "group": number}
        return WorkerGroup(
            number=number,
            workers=workers,
            end=self._channel.call(trainer.fit, self._training, task, workers, self._policy.left_out, seconds),
            watch=HangWatch(workers, self._options.hang_timeout, self._options.start_timeout),
        )

    def _follow(self, group: WorkerGroup) -> GroupEnd:
        """Return how a group ended.

        Raises:
            TrainingError, UsageError: a worker has reported an error that would recur.
        """
        while not group.end.has_returned(POLL_SECONDS):
            began = time.monotonic()
            self._tick()
            if not group.is_placed and (self._cluster.own or group.places or _has_places()):
                self._recorder.ledger.placed(group)
            if any(error.final for error in group.errors):
                break
            if line := group.start_line(time.monotonic()):
                self._recorder.print(line)
            self._grow(group)
            if time.monotonic() - began < messages.HEARTBEAT_SECONDS:  # or newer heartbeats wait
                self._end_hangs(group)
        self._take_messages()  # those that its workers have sent before its end
        if any(error.final for error in group.errors):
            self._stop(group, "", "it would recur")
        return group.end.result()

    def _decide(self, group: WorkerGroup, end: GroupEnd) -> None:
        """Decide what follows the early end of a group.

        Raises:
            TrainingError, UsageError: no further group may start.
        """
        group.is_training = False
        self._size.ended(placed=end != "not placed")
        pause, why = 0.0, None
        event: events.GroupEnded
        if group.resize_to is not None:
            self._channel.notify(None)
            event = events.Resize(workers=group.resize_to)
        elif isinstance(end, events.Failure):
            if end.killed:  # the others only report that these are gone
                group.errors.clear()
            failure = replace(group.described(end, self._options.start_timeout), step=self._step)
            decision = self._policy.failed(failure, group.errors)
            pause, why = decision.pause, decision.stop_reason
            left_out = [node_id[:8] for node_id in decision.leave_out]
            event = end = replace(failure, pause=pause, cause=decision.cause, left_out=left_out)
        elif isinstance(end, events.Preemption):
            event = end if end.killed is None else replace(end, places=group.places_of(end.ranks))
        else:  # it was not placed, so the wait for its places goes on
            return
        self._start_at, self._request_at = time.monotonic() + pause, 0.0
        self._waiting = self._new_wait(pause)
        self._take(event, time.time())
        if isinstance(end, events.Failure) and why is not None:
            self._stop(group, end.error, why)

    def _stop(self, group: WorkerGroup, failure: str, why: str) -> NoReturn:
        self.stop_reason = why
        raise final_error(group.errors, failure, why)

    def _leave(self) -> None:
        """Let workers that train save a checkpoint and leave."""
        group = self.group
        if group is None or not group.is_training:
            return
        self._recorder.print(f"{self._interrupt.why}: saving a checkpoint; interrupt again to leave without it")
        self._channel.notify("stop")
        deadline = time.monotonic() + LEAVE_SECONDS
        while not (group.has_left or self._interrupt.again() or group.end.has_returned(POLL_SECONDS / 4)):
            if time.monotonic() > deadline:
                late = f"the workers did not save a checkpoint within {LEAVE_SECONDS} s: they end without it"
                self._recorder.warn(late)
                return
            self._take_messages()
        self._take_messages()

    def _tick(self) -> None:
        """Watch what may happen at any time.

        Raises:
            KeyboardInterrupt: the end of the run was requested.
        """
        self._cluster.check()  # first: without its processes, calls of Ray may end this process
        self._take_messages()
        if not (self.group is not None and self.group.is_training) and self._policy.take_back():
            self._recorder.print("the other nodes do not suffice any more: those that were left out are used again")
        self._waiting.poll()
        self._recorder.poll(self.group)
        if time.monotonic() >= self._own_node_at:
            self._own_node_at = time.monotonic() + OWN_NODE_SECONDS
            if self._cluster.is_leaving():
                self._interrupt.request(DRAINING)
        if self._interrupt.requested():
            raise KeyboardInterrupt

    def _take_messages(self) -> None:
        for arrived, message in self._channel.empty():
            self._take(message, arrived)

    def _take(self, message: messages.Message, arrived: float) -> None:
        """Pass a message on by its type, and to the recorder; ignore messages of groups that have ended."""
        if self.group is not None:
            if isinstance(message, messages.WorkerMessage) and message.group != self.group.number:
                return
            self.group.take(message)
        match message:
            case messages.EndsEarly():
                self.early_end = message.why
            case messages.Progress():
                self._step = message.step
            case events.Started():
                self._size.started()
                self._policy.group_started(message.step)
                self._waiting.is_over = True
            case events.Quarantined():
                self._policy.made_progress()
        self._recorder.take(message, arrived)

    def _new_wait(self, pause: float = 0.0) -> Waiting:
        return Waiting(self._placement, self._cluster.look, trainer.has_places, self._recorder.print, pause)

    def _suffices(self, left_out: Collection[str]) -> bool:
        asked = self._placement
        return self._cluster.look().reachable(asked.cpus, asked.gpu, left_out) >= asked.minimum

    def _request(self, workers: int) -> "Call[None] | None":
        """Request nodes of the autoscaler for workers that no group has, at times; 0: take the request back."""
        is_needless = workers == self._requested == 0
        if self._cluster.own or is_needless or time.monotonic() < self._request_at:
            return None
        self._requested, self._request_at = workers, time.monotonic() + REQUEST_SECONDS
        facts = self._training, self._requester, workers, self._policy.left_out
        return self._channel.call(trainer.request_workers, *facts)

    def _grow(self, group: WorkerGroup) -> None:
        """Let a group that trains leave for a larger one, if there is room; end it if it does not leave in time."""
        if time.monotonic() > group.leave_until:
            trainer.remove_places()
            group.leave_until = float("inf")
        if group.is_training and group.resize_to is None:
            self._request(self._size.missing(group.workers))
            group.resize_to = self._size.of_larger(group.workers, self._policy.left_out)
            if group.resize_to is not None:
                self._channel.notify("resize")
                group.leave_until = time.monotonic() + RESIZE_SECONDS

    def _end_hangs(self, group: WorkerGroup) -> None:
        """End a group that is not ready in time, and processes that hold it up."""
        if self._waiting.is_over:
            group.watch.group_placed()
        if group.watch.is_late():
            group.is_late = True
            trainer.remove_places()
        elif stuck := group.watch.stuck():
            group.hung |= {(rank.node_id, rank.pid) for rank in stuck}
            hang_detection.kill(stuck)
            self._take(events.Hang(starting=not group.is_training, ranks=stuck), time.time())


def _has_places() -> bool:
    with suppress(Exception):  # Ray does not answer: the next look will tell
        return trainer.has_places()
    return False
