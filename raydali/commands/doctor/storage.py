"""Whether a place for runs can be written, and whether what one node writes there is seen by another."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raydali.errors import UsageError

if TYPE_CHECKING:
    from raydali.run.folder import RunFolder  # imports pyarrow: half a second


@dataclass(frozen=True)
class Marker:
    """A small file in the storage that goes again.

    Args:
        storage: a folder or URI, as --storage of a job.
        key: a text that no other run of the doctor uses.
    """

    storage: str
    key: str

    def path(self) -> str:
        """Write the marker; why it cannot be written, or an empty text."""
        return self._tried("driver", write=True)

    def why_not_here(self) -> str:
        """Why this process cannot read the marker, or write one of its own; empty where it can."""
        return self._tried("driver", write=False) or self._tried(f"{os.uname().nodename}-{os.getpid()}", write=True)

    def remove(self) -> None:
        """Take the markers away."""
        with suppress(OSError, UsageError):
            folder = self._folder()
            folder.filesystem.delete_dir(folder.path())

    def _folder(self) -> "RunFolder":
        from raydali.run.folder import RunFolder

        return RunFolder(self.storage, f"doctor-{self.key}")

    def _tried(self, name: str, *, write: bool) -> str:
        try:
            folder = self._folder()
            if write:
                folder.filesystem.create_dir(folder.path(), recursive=True)
                folder.write(name, self.key.encode())
            elif not folder.exists(name):
                return f"{self.storage}: what the driver wrote is not seen here"
            return "" if folder.read(name) == self.key.encode() else f"{self.storage}: reads other than was written"
        except (OSError, UsageError) as error:
            return f"{self.storage}: {' '.join(str(error).split())[:200]}"
