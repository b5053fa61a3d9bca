"""report.html while a run goes on: the driver hands over what it hears, and the page is written now and then."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from raydali.errors import Superseded
from raydali.report.html.history import History
from raydali.report.html.page import run_page
from raydali.run.events import END_EVENTS
from raydali.run.folder import REPORT, SAMPLES, RunFolder

PAUSE_SECONDS = 5.0
"""Between two pages, from the end of one to the begin of the next."""
MAX_SHARE = 0.02
"""Of the driver's time that pages may take: where one takes long, pauses are longer."""
RELOAD_SECONDS = 15.0
"""After which an open page looks for a newer one."""


class LiveReport:
    """The page of a run, kept up to date. What goes wrong costs one warning, never the run; but where another driver
    has taken over the run, `Superseded` is raised.

    What earlier starts of the run left is read once, at the begin.

    Args:
        warn: takes a line.
        clock: seconds, rising.
    """

    def __init__(
        self, folder: RunFolder, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._history = History(folder.name, str(folder))
        self._warned = self._changed = False
        self._due = 0.0
        self._samples_of: tuple[int, int] | None = None
        self._attempt(self._read)

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of `events.jsonl`; with one that ends the driver the last page is written."""
        self._history.add_event(row)
        self._changed = True
        if row.get("event") in END_EVENTS:
            self._attempt(self._write)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Take a line of `epochs.jsonl`."""
        self._attempt(lambda: self._history.add_epoch(record))
        self._changed = True

    def poll(self) -> None:
        """Write, if there is something new and it is time; to be called often."""
        if not self._changed or self._clock() < self._due:
            return
        began = self._clock()
        self._changed = False
        self._attempt(self._write)
        ended = self._clock()
        self._due = ended + max(PAUSE_SECONDS, (ended - began) / MAX_SHARE)

    def _read(self) -> None:
        self._history = History.read(self._folder)

    def _write(self) -> None:
        (info,) = self._folder.filesystem.get_file_info([self._folder.path(SAMPLES)])
        if info.is_file and (version := (info.mtime_ns, info.size)) != self._samples_of:
            self._history.samples, self._samples_of = self._folder.read(SAMPLES), version
        ended = bool(self._history.events) and self._history.events[-1].get("event") in END_EVENTS
        self._folder.write(REPORT, run_page(self._history, reload_seconds=0 if ended else RELOAD_SECONDS))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Superseded:
            raise
        except Exception as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{REPORT} could not be written: {type(error).__name__}: {error}")
