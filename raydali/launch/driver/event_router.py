"""Routes worker messages in the driver: to events.jsonl, the console, metrics, and the restart policy."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raydali.launch.driver import hang_detection
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.run_recorder import RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.report.console import Console
from raydali.run.events import Event, GroupEnded, Hang, Left, Quarantined, Started
from raydali.run.messages import (
    HEARTBEAT_SECONDS,
    MORE_WARNINGS,
    EpochEnded,
    ForwardedWarning,
    Heartbeat,
    HeartbeatEnded,
    Message,
    Progress,
    WorkerError,
)
from raydali.text import numbered

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel

GATHER_SECONDS = 1.0
"""Delay before a warning is shown, to collect all ranks that gave it."""
MAX_LINES = 100
"""Limit of lines per run."""


class WorkerWarnings:
    """Merges equal warnings of `warnings` and `logging` in workers into one line, which is shown once in a run.

    Otherwise they would only be in the workers' logs, which nobody reads. The output of C++ stays there.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: set[str] = set()
        self._gathering: dict[str, tuple[float, set[int]]] = {}

    def add(self, warning: ForwardedWarning) -> None:
        """Take a warning of one rank."""
        text = warning.text
        if text not in self._known and len(self._known) >= MAX_LINES:
            text = MORE_WARNINGS
        if text not in self._known:
            self._known.add(text)
            self._gathering[text] = self._now(), set()
        if text in self._gathering:
            self._gathering[text][1].add(warning.rank)

    def lines(self, *, at_end: bool = False) -> list[str]:
        """Return the lines that are due; with `at_end` all that are left."""
        due = [text for text, (since, _) in self._gathering.items() if at_end or self._now() - since >= GATHER_SECONDS]
        return [f"{numbered('rank', sorted(self._gathering.pop(text)[1]))}: {text}" for text in due]


class EventRouter:
    """Empties the channel, and routes each message by its type."""

    def __init__(
        self, channel: "DriverChannel", groups: WorkerGroups, watch: HangWatch, recorder: RunRecorder, console: Console
    ) -> None:
        self._channel, self._groups, self._watch = channel, groups, watch
        self._recorder, self._console = recorder, console
        self._warnings = WorkerWarnings()
        self._began = time.time()

    def dispatch(self) -> None:
        """Route all messages that arrived since the last call, start the next group, and end processes that hang."""
        began = time.monotonic()
        end = self._groups.take_end()  # first: what its workers have reported has arrived before
        for arrived, message in self._channel.empty():
            if not self._groups.is_outdated(message):
                self._route(message, arrived)
        if end is not None:
            self._route(end, time.time())
        if self._groups.takes_nodes_back():
            self._console.print("the other nodes do not suffice any more: those that were left out are used again")
        if (smaller := self._groups.start()) is not None:
            self._route(smaller, time.time())
        self._groups.grow()
        self._show_warnings()
        if time.monotonic() - began > HEARTBEAT_SECONDS:  # a slow storage: newer heartbeats have arrived meanwhile
            return
        self._end_hangs()

    def _end_hangs(self) -> None:
        if placed := self._groups.placed:
            self._watch.group_placed(placed)
        if self._watch.is_late():
            self._groups.end_late()
        elif stuck := self._watch.stuck():
            self._groups.hung(stuck)
            hang_detection.kill(stuck)  # before the storage is written to, which may take long
            self._route(Hang(starting=not self._groups.training, ranks=stuck), time.time())

    def close(self, end: Event) -> None:
        """Record how the driver ends, as the last event."""
        self._show_warnings(at_end=True)
        self._recorder.event(end, time.time())

    def _route(self, message: Message, arrived: float) -> None:
        if isinstance(message, Event):
            message = replace(message, seconds=round(arrived - self._began, 3))
        match message:
            case Heartbeat():
                self._watch.heartbeat(message)
                self._groups.heartbeat(message)
            case HeartbeatEnded():
                self._watch.forget((message.node_id, message.pid))
            case ForwardedWarning():
                self._warnings.add(message)
            case WorkerError():
                self._groups.add_error(message)
            case Progress():
                self._groups.step = message.step
            case EpochEnded(record):
                self._recorder.epoch(record)
            case Started():
                self._groups.started(message.step)
                self._watch.training_started()
            case Quarantined():
                self._groups.learnt()
            case Left():
                self._groups.left()
            case GroupEnded():
                self._watch.group_ended()
                message = self._groups.ended(message)
        if isinstance(message, Event):
            self._recorder.event(message, arrived)
        self._console.show(message)

    def _show_warnings(self, *, at_end: bool = False) -> None:
        for line in self._warnings.lines(at_end=at_end):
            self._console.warn(line)
