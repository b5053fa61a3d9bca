"""Checks that a storage is writable, and that nodes see each other's files in it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raydali.errors import UsageError

if TYPE_CHECKING:
    from raydali.run.folder import RunFolder  # imports pyarrow: half a second


@dataclass(frozen=True)
class Marker:
    """A small temporary file in the storage.

    Args:
        storage: a folder or URI, like --storage of a job.
        key: a string that is unique to this run of the doctor.
    """

    storage: str
    key: str

    def write_error(self) -> str:
        """Write the marker; return why this failed, or an empty string."""
        return self._attempt("driver", write=True)

    def read_error(self) -> str:
        """Return why this process cannot read the marker or write its own marker; empty if it can."""
        return self._attempt("driver", write=False) or self._attempt(f"{os.uname().nodename}-{os.getpid()}", write=True)

    def remove(self) -> None:
        """Delete the markers of all nodes."""
        with suppress(OSError, UsageError):
            folder = self._folder()
            folder.filesystem.delete_dir(folder.path())

    def _folder(self) -> "RunFolder":
        from raydali.run.folder import RunFolder

        return RunFolder(self.storage, f"doctor-{self.key}")

    def _attempt(self, name: str, *, write: bool) -> str:
        try:
            folder = self._folder()
            if write:
                folder.filesystem.create_dir(folder.path(), recursive=True)
                folder.write(name, self.key.encode())
            elif not folder.exists(name):
                return f"{self.storage}: the driver's file is not visible here"
            return "" if folder.read(name) == self.key.encode() else f"{self.storage}: reads differ from writes"
        except (OSError, UsageError) as error:
            return f"{self.storage}: {' '.join(str(error).split())[:200]}"
