"""The driver's ledger of its run: when it held workers, what they report, and `ledger.json`, which it keeps up to date.

The modification time of a local `ledger.json` is the driver's last sign of life: a later driver takes it for the end of
a group whose driver died. On an object store this is the time of the last write.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from raydali.errors import UsageError
from raydali.host import start_clock
from raydali.launch.driver.worker_group import WorkerGroup
from raydali.run.events import CeilingMeasured, Rehearsed, Resumed, Started
from raydali.run.folder import EPOCHS, RunFolder
from raydali.run.ledger import LEDGER, Held, Ledger, describe, group_id
from raydali.run.messages import EpochEnded, Message

WRITE_SECONDS, WRITE_REMOTE_SECONDS = 10.0, 60.0
"""Intervals of writing the file on a file system and on an object store."""
PUBLISH_SECONDS = 4.0
"""Interval of publishing to Prometheus: Ray drops a metric that was not set for two of its own intervals."""
TOUCH_SECONDS = 0.5


class RunLedger:
    """The ledger of a run, and its file.

    Args:
        folder: the run's.
        driver: the id of this driver's attempt.
        price: see `--price`.
        publish: takes the contents of the file at intervals.
        now: seconds since 1970.
    """

    def __init__(
        self,
        folder: RunFolder,
        driver: str,
        price: float | None,
        publish: Callable[[Mapping[str, Any]], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._driver, self._price, self._publish, self._now = folder, driver, price, publish, now
        self._held: Held | None = None
        self._restarts = False
        self._touch_at = self._write_at = self._publish_at = 0.0
        self._ledger = self._read()
        # The command began the waiting, unless an earlier driver of this process has.
        released = [group.released or 0.0 for group in self._ledger.groups]
        self._free_since = max([next((at for _, at in start_clock.marks()), now()), *released])

    def _read(self) -> Ledger:
        """Return the ledger of the run's earlier drivers, as far as there is one that can be read."""
        ledger = Ledger()
        with suppress(OSError, ValueError, TypeError, KeyError):
            ledger = Ledger(self._folder.read_json(LEDGER)["groups"])
            alive = self._folder.modified(LEDGER)
            for group in ledger.groups:
                if group.released is None:
                    group.released = max(alive, group.placed)
        with suppress(OSError, UsageError, TypeError, KeyError):
            for row in self._folder.each_row(EPOCHS):
                ledger.add_epoch(row)
        return ledger

    def placed(self, group: WorkerGroup) -> None:
        """Note that a group has its places."""
        group.is_placed = True
        now = self._now()
        self._held = Held(
            group=group_id(self._driver, group.number),
            workers=group.workers,
            placed=now,
            waited=max(0.0, now - self._free_since),
            restarts=self._restarts,
        )
        self._restarts = True
        self._ledger.groups.append(self._held)
        self._write_at = 0.0

    def released(self, group: WorkerGroup | None, *, finished: bool = False) -> None:
        """Note that a group, if there is one, has ended; `finished`: with the run."""
        if self._held is None or group is None:
            return
        self._held.saved = finished or group.has_left
        self._held.joules = sum(group.joules.values()) if len(group.joules) == group.workers else None
        self._held.released = self._free_since = self._now()
        self._held = None
        self._write()

    def take(self, message: Message, at: float) -> None:
        """Take a message of the workers, which arrived at this time."""
        match message:
            case Started():
                if isinstance(message, Resumed):
                    self._ledger.take_back(message.step)
                if self._held is not None:
                    self._held.start(at, message.phases)
            case Rehearsed():
                if isinstance(message, CeilingMeasured) and self._held is not None:
                    self._held.measured += message.rehearsal_seconds
                if self._held is not None and message.ceiling_images_per_second:
                    self._ledger.add_ceiling(self._held.workers, message.ceiling_images_per_second)
            case EpochEnded(record):
                self._ledger.add_epoch(record)

    def poll(self, group: WorkerGroup | None) -> None:
        """Give a sign of life, and write the file, if it is time to."""
        now = self._now()
        if now >= self._touch_at:
            self._touch_at = now + TOUCH_SECONDS
            self._folder.touch(LEDGER)
        if self._held is not None and group is not None and len(group.joules) == group.workers:
            self._held.joules = sum(group.joules.values())
        if now >= self._publish_at:
            self._publish_at = now + PUBLISH_SECONDS
            self._publish(self._ledger.summary(now, self._price))
        if now >= self._write_at and self._held is not None:
            remote = "://" in self._folder.uri_of_storage
            self._write_at = now + (WRITE_REMOTE_SECONDS if remote else WRITE_SECONDS)
            self._write()

    def close(self) -> list[str]:
        """Write the file for the last time; return lines for the console, none if no worker was held."""
        self._write()
        summary = self._ledger.summary(self._now(), self._price)
        self._publish(summary)
        return describe(summary) if self._ledger.groups else []

    def _write(self) -> None:
        with suppress(OSError):  # the next write has it
            self._folder.write_json(LEDGER, self._ledger.summary(self._now(), self._price))
