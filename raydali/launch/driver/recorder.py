"""Records what happens to a run: in its folder, for Prometheus and for trackers."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from raydali.host.background import Background
from raydali.report.html.live import LiveReport
from raydali.run.events import Event, Quarantined, Started
from raydali.run.folder import EVENTS, REPORT, RunFolder
from raydali.run.ledger import LEDGER, PARTS
from raydali.run.messages import MORE_WARNINGS, ForwardedWarning
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
    """Records events, epochs and the ledger. A thread writes the files, since the storage may not answer for minutes.

    Args:
        folder: the run's.
        track: takes the record of each epoch.
        warn: takes a line for the console.

    Attributes:
        background: the thread.
        report: the page, which belongs to the thread until `finish`.
    """

    def __init__(
        self, folder: RunFolder, track: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]
    ) -> None:
        self._folder, self._track, self._warn = folder, track, warn
        self.background = Background("recorder")
        self.report, self._metrics = LiveReport(folder, warn), RunMetrics(folder.name)
        self._unwritten: list[dict[str, Any]] = []

    def event(self, event: Event, at: float) -> None:
        """Record an event. A row that cannot be written, to a full disk for example, is written with the next one.

        Args:
            event: the event.
            at: its time, in seconds since 1970; what the driver does about an earlier one may take seconds.
        """
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
            self._warn(f"an event cannot be written to {self._folder}: {error}; it is written with the next one")

    def ledger(self, summary: Mapping[str, Any]) -> None:
        """Publish the ledger of the run."""
        self._metrics.ledger(summary)
        self.background.calls.put(partial(self._write_ledger, summary))

    def _write_ledger(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write the ledger; without one, set the time of its file, as a sign of life."""
        with suppress(OSError):  # the next write has it; an object store has no file whose time can be set
            if summary is None:
                os.utime(self._folder.path(LEDGER))
            else:
                self._folder.write_json(LEDGER, summary)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Record an epoch; the workers write its row in `epochs.jsonl` with their next checkpoint."""
        self._track(record)
        self.background.calls.put(partial(self.report.epoch, record))

    def poll(self) -> None:
        """Keep the page up to date, and give a sign of life; must be called often.

        Raises:
            SupersededError: another driver has taken over the run.
        """
        if self.background.error is not None:
            raise self.background.error
        if self.background.calls.empty():  # or the storage does not answer
            self.background.calls.put(self._write_ledger)
            self.background.calls.put(self.report.poll)

    def finish(self, leaves: Callable[[], bool]) -> None:
        """Wait until everything is written, for a minute or until the driver leaves. For the errors see `poll`."""
        done, until = self.background.done(), time.monotonic() + END_SECONDS
        while not done.wait(0.2):
            if leaves() or time.monotonic() > until:
                self._warn(f"{self._folder} does not answer: {EVENTS}, {REPORT} and {LEDGER} lack what is new")
                break
        self.poll()


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
