"""Records and shows what happens to a run: in its folder, on the console, for Prometheus and for trackers."""

import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from raydali.host.background import Background
from raydali.launch.driver.job_file import typed
from raydali.launch.driver.run_ledger import RunLedger
from raydali.launch.driver.worker_group import WorkerGroup
from raydali.launch.job import WorkerTask
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.events import Event, Quarantined, RunFinished, Started
from raydali.run.folder import EVENTS, REPORT
from raydali.run.ledger import LEDGER, PARTS
from raydali.run.messages import MORE_WARNINGS, EpochEnded, ForwardedWarning, Message
from raydali.text import numbered

RESTARTS = "raydali_restarts"
QUARANTINED = "raydali_quarantined"
LEDGER_GAUGES = {
    "goodput": ("raydali_goodput_ratio", "Share of the held time in which workers trained at the ceiling."),
    "kwh": ("raydali_energy_kwh", "Energy of the GPUs that this run has used."),
    "cost_usd": ("raydali_cost_usd", "Cost of this run by --price."),
}
HELD = "raydali_held_worker_seconds"
GATHER_SECONDS = 1.0
"""Delay before a warning is shown, to collect all ranks that gave it."""
END_SECONDS = 60.0
"""How long a driver that ends waits for a storage that does not answer."""
MAX_LINES = 100
"""Limit of lines of warnings per run."""


class RunMetrics:
    """Counters of the run of that name that only the driver knows; launch/worker/run_meter.py has the others."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Counter, Gauge

        self._restarts = Counter(RESTARTS, "Restarts of the workers of this run, after failures and resizes.", ("run",))
        self._quarantined = Counter(QUARANTINED, "Broken samples of this run.", ("run",))
        self._ledger = {name: Gauge(gauge, text, ("run",)) for name, (gauge, text) in LEDGER_GAUGES.items()}
        self._held = Gauge(HELD, "Time for which workers of this run were held, by what it went to.", ("run", "part"))
        for metric in (self._restarts, self._quarantined, self._held, *self._ledger.values()):
            metric.set_default_tags({"run": run})
        for counter in (self._restarts, self._quarantined):
            counter._record(0.0)  # so that Prometheus sees the first increment; `inc` refuses 0
        self._started = False

    def ledger(self, summary: Mapping[str, Any]) -> None:
        """Publish the ledger; Ray drops a gauge that was not set for 20 s."""
        for name, gauge in self._ledger.items():
            gauge.set(summary[name])  # which ignores None
        for part in PARTS:
            self._held.set(summary["worker_seconds"][part], {"part": part})

    def count(self, event: Event) -> None:
        """Count restarts, which are starts but the first, and broken samples."""
        if isinstance(event, Quarantined):
            self._quarantined.inc()
        elif isinstance(event, Started):
            if self._started:
                self._restarts.inc()
            self._started = True


class RunRecorder:
    """Records and shows what happens. A thread writes the files, since the storage may not answer for minutes.

    Args:
        task: what the workers of the run do.
        track: takes the record of each epoch.
        console: shows messages.

    Attributes:
        background: the thread.
        report: the page, which belongs to the thread until `close`.
        ledger: when the run held workers; the page and `ledger.json` have what it publishes.
        print, warn: show a line on the console.
    """

    def __init__(self, task: WorkerTask, track: Callable[[Mapping[str, Any]], None], console: Console) -> None:
        self._folder, self._track, self._console = task.folder, track, console
        self.print, self.warn = console.print, console.warn
        self.background = Background("recorder")
        self.report, self._metrics = LiveReport(task.folder, self.warn), RunMetrics(task.folder.name)
        self._unwritten: list[dict[str, Any]] = []
        self._warnings, self._began = WorkerWarnings(), time.time()
        self.ledger = RunLedger(task.folder, task.attempt, task.options, self._publish)

    def take(self, message: Message, arrived: float) -> None:
        """Record and show a message that arrived at this time, in seconds since 1970.

        What the driver does about an earlier one may take seconds.
        """
        self.ledger.take(message, arrived)
        match message:
            case ForwardedWarning():
                self._warnings.add(message)
            case EpochEnded(record):  # the workers write its row in `epochs.jsonl` with their next checkpoint
                self._track(record)
                self.background.calls.put(partial(self.report.epoch, record))
            case Event():
                message = replace(message, seconds=round(arrived - self._began, 3))
                if isinstance(message, Started):
                    message = replace(message, command=shlex.join(typed))
                self._record(message, arrived)
        self._console.show(message)

    def _record(self, event: Event, at: float) -> None:
        """Record an event. A row that cannot be written, to a full disk for example, is written with the next one."""
        self._metrics.count(event)
        self.background.calls.put(partial(self._write_event, {"time": round(at, 3), **event.row()}))

    def _write_event(self, row: dict[str, Any]) -> None:
        self.report.event(row)
        self._unwritten.append(row)
        try:
            while self._unwritten:
                self._folder.append(EVENTS, self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self.warn(f"an event cannot be written to {self._folder}: {error}; it is written with the next one")

    def _publish(self, ledger: Mapping[str, Any]) -> None:
        self._metrics.ledger(ledger)
        self.background.calls.put(partial(self._write_ledger, ledger))
        self._console.ledger(ledger)

    def _write_ledger(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write the ledger; without one, set the time of its file, as a sign of life."""
        with suppress(OSError):  # the next write has it; an object store has no file whose time can be set
            if summary is None:
                os.utime(self._folder.path(LEDGER))
            else:
                self._folder.write_json(LEDGER, summary)

    def poll(self, group: WorkerGroup | None) -> None:
        """Keep everything up to date while this group is the newest, and give a sign of life; must be called often.

        Raises:
            SupersededError: another driver has taken over the run.
        """
        self._check()
        if self.background.calls.empty():  # or the storage does not answer
            self.background.calls.put(self._write_ledger)
            self.background.calls.put(self.report.poll)
        self.ledger.poll(group)
        self._show_warnings()

    def close(self, end: Event, group: WorkerGroup | None, leaves: Callable[[], bool]) -> None:
        """Record how the driver ends, as the last event, and show the ledger; then `finish`.

        Args:
            end: the event.
            group: the newest worker group, whose workers that still run end with this process's Ray.
            leaves: returns whether the driver leaves now.
        """
        self._show_warnings(at_end=True)
        self.ledger.released(group, finished=isinstance(end, RunFinished))
        lines = self.ledger.publish()
        self._record(end, time.time())
        self.finish(leaves)
        for line in lines:
            self.print(line)

    def finish(self, leaves: Callable[[], bool]) -> None:
        """Wait until everything is written, for a minute or until the driver leaves. For the errors see `poll`."""
        done, until = self.background.done(), time.monotonic() + END_SECONDS
        while not done.wait(0.2):
            if leaves() or time.monotonic() > until:
                self.warn(f"{self._folder} does not answer: {EVENTS}, {REPORT} and {LEDGER} lack what is new")
                break
        self._check()

    def _check(self) -> None:
        if self.background.error is not None:
            raise self.background.error

    def _show_warnings(self, *, at_end: bool = False) -> None:
        for line in self._warnings.lines(at_end=at_end):
            self.warn(line)


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
