"""report.html of a live run: the driver passes on events and epochs, and the page is rewritten at intervals."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from raydali.errors import SupersededError
from raydali.report.html.history import FILES, History
from raydali.report.html.page import run_page
from raydali.run.events import END_EVENTS
from raydali.run.folder import REPORT, RunFolder

PAUSE_SECONDS = 5.0
"""Minimum pause between two pages."""
MAX_SHARE = 0.02
"""Limit of the driver's time that pages take: if one takes long, pauses are longer."""
RELOAD_SECONDS = 15.0
"""Interval at which an open page reloads."""


class LiveReport:
    """The page of a run, kept up to date.

    A failure costs one warning, never the run. Only `SupersededError` is raised: another driver has taken over.

    What earlier starts of the run left is read once, at the beginning.

    Args:
        warn: takes a line.
        clock: seconds, rising.

    Attributes:
        history: what the page shows.
    """

    def __init__(
        self, folder: RunFolder, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self.history = History(folder.name, str(folder))
        self._warned = self._changed = False
        self._due = 0.0
        self._versions: dict[str, tuple[int, int] | None] = {}
        self._attempt(self._read)

    def event(self, row: Mapping[str, Any]) -> None:
        """Add a row of `events.jsonl`; if it ends the driver, the last page is written."""
        self.history.add_event(row)
        self._changed = True
        if row.get("event") in END_EVENTS:
            self._attempt(self._write)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Add a line of `epochs.jsonl`."""
        self._attempt(lambda: self.history.add_epoch(record))
        self._changed = True

    def poll(self) -> None:
        """Write the page if something has changed and the pause is over; must be called often."""
        if not self._changed or self._clock() < self._due:
            return
        began = self._clock()
        self._changed = False
        self._attempt(self._write)
        ended = self._clock()
        self._due = ended + max(PAUSE_SECONDS, (ended - began) / MAX_SHARE)

    def _read(self) -> None:
        self.history = History.read(self._folder)

    def _write(self) -> None:
        infos = self._folder.filesystem.get_file_info([self._folder.path(file) for file in FILES])
        for file, info in zip(FILES, infos, strict=True):
            version = (info.mtime_ns, info.size) if info.is_file else None
            if version is None:
                self.history.files.pop(file, None)
            elif version != self._versions.get(file):
                self.history.files[file] = self._folder.read(file)
            self._versions[file] = version
        ended = bool(self.history.events) and self.history.events[-1].get("event") in END_EVENTS
        self._folder.write(REPORT, run_page(self.history, reload_seconds=0 if ended else RELOAD_SECONDS))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SupersededError:
            raise
        except Exception as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{REPORT} could not be written: {type(error).__name__}: {error}")
