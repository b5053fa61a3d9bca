"""Ownership of a run's folder by the newest driver and its newest worker group; older ones can no longer write.

attempt.json    the driver's random id, and the number of its worker group; 0 before the first one

Two drivers may train the same run, for example on two machines. A node that has lost its network may also continue for
a minute after Ray has started its workers elsewhere, and may still reach the storage.
"""

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from raydali.errors import SupersededError
from raydali.run.folder import RunFolder

ATTEMPT = "attempt.json"


@dataclass(frozen=True)
class Attempt:
    """A driver, or one of its worker groups.

    Attributes:
        driver: a random id.
        group: the worker group's number, from 1; 0: the driver itself.
    """

    driver: str = field(default_factory=lambda: secrets.token_hex(8))
    group: int = 0

    def take(self, folder: RunFolder) -> None:
        """Take over the folder: earlier attempts can no longer write from now on.

        Raises:
            SupersededError: this is a worker group, and another driver or a newer group has taken the folder.
        """
        if self.group:
            self._check(folder)
        folder.write_json(ATTEMPT, {"driver": self.driver, "group": self.group, "time": round(time.time(), 3)})

    def fenced(self, folder: RunFolder) -> RunFolder:
        """Return a folder in which each write, rename and deletion checks that this attempt still owns it.

        If it does not, they raise `SupersededError`, which is no OSError.
        """
        return replace(folder, fence=lambda: self._check(folder))

    def _check(self, folder: RunFolder) -> None:
        try:
            newest: Any = folder.read_json(ATTEMPT)
            driver, group = newest["driver"], newest["group"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return  # it was deleted, or the disk is unmounted and the write fails
        if driver != self.driver:
            raise SupersededError(
                f"another driver has taken over {folder}: this driver ends and writes nothing more to it"
            )
        if self.group and group > self.group:
            raise SupersededError(
                f"newer workers of this run have taken over {folder}: these workers end and write nothing more to it"
            )
