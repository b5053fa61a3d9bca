"""Notes which samples a loader has in flight, in a file on the node that outlives the process.

If a decoder crashes its process, processes that start later, or take over its samples, find there which ones to try in
a child process first (screening.py, quarantine.py). Processes that were killed otherwise leave nothing to try.
"""

import faulthandler
import fcntl
import mmap
import os
import tempfile
from collections import defaultdict, deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

MOST = 2**16
"""The number of ids that a file holds, the last ones."""
_HEAD = 2
"""The file begins with the numbers of ids that were noted and handed out so far."""
_CRASH = ".crash"


class InFlight:
    """The samples that a loader has in flight. A batch costs microseconds: the file is mapped into memory.

    Args:
        path: the beginning of the file's path; None: nothing is noted.
    """

    def __init__(self, path: Path | None) -> None:
        self._batches = deque[tuple[int, int]]()
        self._file: IO[bytes] | None = None
        self._slots = np.zeros(_HEAD + 1, np.int64)
        if path is None:
            return
        with suppress(OSError):  # without notes, a crash costs more restarts
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _note_crashes(path.parent, os.getpid())
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed by `close`)
                prefix=f"{path.name}.{os.getpid()}.", dir=path.parent, delete=False
            )
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # forks do not hold it
            self._file.write(bytes(8 * (_HEAD + MOST)))  # a page without room on the disk would end the process
            self._file.flush()
            self._slots = np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.int64)

    def begin(self, number: int, ids: NDArray[np.int64]) -> None:
        """Note the samples (N,) of the micro-batch of this number, before they are read."""
        places = (self._slots[0] + np.arange(len(ids))) % (len(self._slots) - _HEAD)
        self._slots[_HEAD + places] = ids
        self._slots[0] += len(ids)
        self._batches.append((number, len(ids)))

    def end(self, number: int) -> None:
        """Note that this micro-batch, and all that began before it, are decoded."""
        while self._batches:
            ended, count = self._batches.popleft()
            self._slots[1] += count
            if ended == number:
                break

    def clear(self) -> None:
        """Note that nothing is in flight."""
        self._batches.clear()
        self._slots[1] = self._slots[0]

    def close(self) -> None:
        """Remove the file."""
        self._slots = np.zeros(_HEAD + 1, np.int64)
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()


@cache
def _note_crashes(folder: Path, process: int) -> IO[str]:
    """Have the signal that crashes this process written into a file, as well as to where Ray writes it."""
    file = (folder / f"{process}{_CRASH}").open("w")
    faulthandler.enable(file, all_threads=False)
    return file


def left_in_flight(folder: Path) -> dict[str, list[int]]:
    """Return what crashed processes had in flight, by the name of the path of `InFlight`, and drop all other notes.

    Their notes are kept for later starts: another file may crash the run before a checkpoint has this one.
    """
    left = defaultdict[str, list[int]](list)
    with suppress(OSError), (folder / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        for path in [*folder.glob("*.*.*")]:
            name, process, _ = path.name.rsplit(".", 2)
            if int(process) == os.getpid():
                continue
            with suppress(OSError), path.open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while the process is alive
                if not (contents := file.read()):  # just made by another process
                    continue
                noted, ended, *slots = np.frombuffer(contents, np.int64).tolist()
                ids = [slots[place % len(slots)] for place in range(max(ended, noted - len(slots)), noted)]
                crash = folder / f"{process}{_CRASH}"
                if not (ids and crash.exists() and crash.stat().st_size):
                    path.unlink()
                    continue
                left[name] += ids
    return left
