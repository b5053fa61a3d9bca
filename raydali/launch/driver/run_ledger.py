"""The driver's ledger of its run: when it held workers, and what they report; recorder.py writes `ledger.json`.

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
from raydali.options.every_job import TrainingOptions
from raydali.run.events import CeilingMeasured, Rehearsed, Resumed, Started
from raydali.run.folder import EPOCHS, RunFolder
from raydali.run.ledger import LEDGER, Held, Ledger, describe, group_id
from raydali.run.messages import EpochEnded, Message

PUBLISH_SECONDS = 5.0
"""Interval of publishing it: Ray drops a metric that was not set for 20 s."""


class RunLedger:
    """The ledger of a run.

    Args:
        folder: the run's.
        driver: the id of this driver's attempt.
        options: of the job.
        publish: takes the contents of the file.
    """

    def __init__(
        self, folder: RunFolder, driver: str, options: TrainingOptions, publish: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._folder, self._driver, self._options, self._publish = folder, driver, options, publish
        self._held: Held | None = None
        self._restarts, self._publish_at = False, 0.0
        self._ledger = self._read()
        # The command began the waiting, unless an earlier driver of this process has.
        released = [group.released or 0.0 for group in self._ledger.groups]
        self._free_since = max([next((at for _, at in start_clock.marks()), time.time()), *released])

    def _read(self) -> Ledger:
        """Return the ledger of the run's earlier drivers, as far as there is one that can be read."""
        ledger = Ledger()
        with suppress(OSError, ValueError, TypeError, KeyError):
            ledger = Ledger(self._folder.read_json(LEDGER)["groups"])
            alive = self._folder.filesystem.get_file_info(self._folder.path(LEDGER)).mtime_ns / 1e9
            for group in ledger.groups:
                if group.released is None:
                    group.released = max(alive, group.placed)
        with suppress(OSError, UsageError, TypeError, KeyError):
            for row in self._folder.each_row(EPOCHS):
                ledger.add_epoch(row)
        return ledger

    def placed(self, group: WorkerGroup) -> None:
        """Note that a group has its places."""
        group.is_placed, now = True, time.time()
        self._held = Held(
            group=group_id(self._driver, group.number),
            workers=group.workers,
            placed=now,
            sharded_over=self._options.sharded_over(group.workers),
            waited=max(0.0, now - self._free_since),
            restarts=self._restarts,
        )
        self._restarts = True
        self._ledger.groups.append(self._held)
        self.publish()

    def released(self, group: WorkerGroup | None, *, finished: bool = False) -> None:
        """Note that a group, if there is one, has ended; `finished`: with the run."""
        if self._held is not None and group is not None:
            self._held.saved = finished or group.has_left
            self._held.released = self._free_since = time.time()
            self._held = None
            self.publish()

    def take(self, message: Message, at: float) -> None:
        """Take a message of the workers, which arrived at this time."""
        if isinstance(message, EpochEnded):
            self._ledger.add_epoch(message.record)
        if self._held is None:
            return
        if isinstance(message, Resumed):
            self._ledger.take_back(message.step)
        if isinstance(message, Started):
            self._held.start(at, message.phases)
            self.publish()
        if isinstance(message, CeilingMeasured):
            self._held.measured += message.rehearsal_seconds
        if isinstance(message, Rehearsed) and message.ceiling_images_per_second:
            self._ledger.ceilings[self._held.workers] = message.ceiling_images_per_second

    def poll(self, group: WorkerGroup | None) -> None:
        """Publish the ledger if it is time to."""
        if self._held is None or group is None:
            return
        if len(group.joules) == group.workers:
            self._held.joules = sum(group.joules.values())
        if time.monotonic() >= self._publish_at:
            self.publish()

    def publish(self) -> list[str]:
        """Publish the ledger; return two lines for the console, none if no worker was held."""
        summary = self._ledger.summary(time.time(), self._options.price)
        self._publish(summary)
        self._publish_at = time.monotonic() + PUBLISH_SECONDS
        return describe(summary) if self._ledger.groups else []
