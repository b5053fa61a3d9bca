"""Takes what the driver hears to where it belongs: the events, the console, metrics, and the decision to go on."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raydali.launch.driver import hang_detection
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.pending_resources import PendingResources
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.worker_warnings import WorkerWarnings
from raydali.report.console import Console
from raydali.report.html.history import GROUP_END_EVENTS
from raydali.report.html.live import LiveReport
from raydali.run.folder import EVENTS, RunFolder

if TYPE_CHECKING:
    from raydali.launch.channel import DriverChannel, WorkerAddress
    from raydali.launch.driver.run_metrics import RunMetrics


class EventRouter:
    """Empties the mailbox.

    Attributes:
        errors: what workers of the last group said that ended before its time, or of the present one, the first first.
        failure: what Ray Train said of that end; empty for nothing.
        why: why the run must end, though Ray Train would start it again; None while it may go on.
        training: whether a worker group is past its first step.
        left: whether the workers have gone on notice, behind a checkpoint.
    """

    def __init__(
        self,
        mailbox: "DriverChannel",
        folder: RunFolder,
        console: Console,
        waiting: PendingResources,
        track: Callable[[Mapping[str, Any]], None],
        metrics: "RunMetrics",
        report: LiveReport,
        policy: RestartPolicy,
        watch: HangWatch,
        describe_deaths: Callable[
            [Sequence[int], "Mapping[int, WorkerAddress]", str, "Collection[WorkerAddress]"], str
        ],
    ) -> None:
        self.errors: list[Mapping[str, Any]] = []
        self.why: str | None = None
        self.failure = ""
        self.training = self.left = False
        self._mailbox, self._folder, self._console, self._waiting = mailbox, folder, console, waiting
        self._track, self._metrics, self._report = track, metrics, report
        self._policy, self._watch, self._describe_deaths = policy, watch, describe_deaths
        self._began = time.monotonic()
        self._step = 0
        self._group = ""
        self._gone: set[str] = set()
        self._ended = False
        self._permit: tuple[float, int] | None = None
        self._hung: set[WorkerAddress] = set()
        self._unwritten: list[dict[str, Any]] = []
        self._overheard = WorkerWarnings()

    def dispatch(self) -> None:
        """Take all that came since the last time, and look whether the run stands still."""
        for message in self._mailbox.empty():
            kind = message["kind"]
            group = message.pop("group", self._group)
            if group in self._gone:  # a worker's last word, behind the end of its group
                continue
            self._group = group
            if kind == "beat":
                self._watch.beat(message)
                continue
            if kind == "error":
                if self._ended:  # the first word of a new group
                    self.errors, self._ended = [], False
                self.errors.append(message)
                if message["final"]:
                    self.why = "it would come again"
            elif kind == "event":
                message |= {"seconds": self._seconds()}
                self._event(message)
            elif kind == "overheard":
                self._overheard.take(message)
            elif kind == "progress":
                self._step = message["step"]
            elif kind == "epoch":
                self._track(message["record"])
                self._report.epoch(message["record"])
            self._console.show(message)
        self._permit_start()
        self._say_overheard()
        if stuck := self._watch.stuck():
            ranks = [asdict(each) for each in stuck]
            event = {"event": "hang", "starting": not self.training, "ranks": ranks, "seconds": self._seconds()}
            self._console.show({"kind": "event", **event})
            self._event(event)
            self._hung |= {(each.node_id, each.pid) for each in stuck}
            hang_detection.kill(stuck)

    def _say_overheard(self, *, at_end: bool = False) -> None:
        for line in self._overheard.lines(at_end=at_end):
            self._console.warn(line)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _event(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name in ("start", "resume"):
            self.training, self.left = True, False
            self._mailbox.write(training=True, left=False)
            self.errors, self.failure, self._ended = [], "", False
            self._metrics.started()
            self._policy.begun(event["step"])
            self._watch.begun()
        elif name == "quarantine":
            self._metrics.quarantined()
        elif name == "left":
            self.left = True
            self._mailbox.write(left=True)
        if name in GROUP_END_EVENTS:
            self._group_end(event)
        elif name != "hang":
            self._waiting.over()
        self._note(_row({name: value for name, value in event.items() if name != "kind"}))

    def _group_end(self, event: dict[str, Any]) -> None:
        self.training = False
        self._watch.over()
        self._gone |= {self._group} - {""}
        self._group, self._ended = "", True
        end, pause = event.pop("end", 0), 0.0
        if event["event"] == "failure":
            if event["killed"]:  # what the others say is that it is gone
                self.errors = []
            decision = self._policy.failed(event, self.errors, self._step)
            self.why = self.why or decision.stop_reason
            pause = decision.pause
            places = event.pop("places", {})
            event |= {"step": self._step, "pause": pause, "cause": decision.cause}
            event["nodes"] = sorted({node_id[:8] for node_id, _ in places.values()})
            event["left_out"] = [node_id[:8] for node_id in decision.leave_out]
        self._permit = time.monotonic() + pause, end
        self._permit_start()
        if event["event"] == "failure":
            if event["killed"]:
                event["error"] = self._describe_deaths(event["killed"], places, event["error"], self._hung)
            self.failure = event["error"]

    def _permit_start(self) -> None:
        """Let the controller start the next worker group, once the pause before it is over."""
        if self._permit is None or self.why is not None or time.monotonic() < self._permit[0]:
            return
        self._mailbox.write(permitted=self._permit[1], left_out=self._policy.left_out, training=False, left=False)
        self._waiting.again()
        self._permit = None

    def _note(self, row: dict[str, Any]) -> None:
        self._report.event(row)
        self._unwritten.append(row)
        try:
            while self._unwritten:  # what a full disk did not take comes with the next
                self._folder.append(EVENTS, self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self._console.warn(f"an event could not be written to {self._folder}: {error}")

    def end(self, event: str, **facts: Any) -> None:
        """Note how the driver ended, as the last event."""
        self._say_overheard(at_end=True)
        self._note(_row({"event": event, **facts}))


def _row(event: dict[str, Any]) -> dict[str, Any]:
    """A row of `events.jsonl`, with the time of now (seconds since 1970)."""
    return {"time": round(time.time(), 3), **event}
