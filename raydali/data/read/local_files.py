"""Reads many local files at a time by DALI, in C++: Python would wait for the interpreter several times a file."""

import importlib.util
import os
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from nvidia.dali.tensors import TensorListCPU

FEW = 4
"""So many files Python reads as fast."""
_READERS, _THREADS = 2, 4
"""Batches that are read at the same time, and files of each, to hide the latency of a disk or of a file server."""


class _Reader:
    """A pipeline of DALI that reads files, for one thread at a time; it is made anew for larger batches."""

    def __init__(self) -> None:
        self._most = 0

    def read(self, paths: NDArray[np.uint8]) -> "TensorListCPU":
        """Return the contents of files. Raises RuntimeError if one cannot be read."""
        import nvidia.dali as dali
        from nvidia.dali import fn

        if len(paths) > self._most:
            self._pipeline = dali.Pipeline(len(paths), _THREADS, device_id=None, prefetch_queue_depth=1)
            with self._pipeline:
                files = fn.external_source(name="paths", device="cpu", no_copy=True)
                self._pipeline.set_outputs(fn.io.file.read(files, dont_use_mmap=True))
            self._most = len(paths)
        try:
            contents: TensorListCPU = self._pipeline.run(paths=paths)[0]
        except RuntimeError:
            self._most = 0  # the pipeline is of no more use
            raise
        return contents


def read_by_dali(paths: NDArray[np.uint8]) -> "TensorListCPU | None":
    """Return the contents of the files at these paths, whose rows may end with NULs.

    None if DALI cannot read one of them, if they are few, or if there is no DALI.
    """
    if len(paths) <= FEW or importlib.util.find_spec("nvidia.dali") is None:
        return None
    idle = _idle(os.getpid())
    reader = idle.get()
    try:
        return reader.read(paths)
    except RuntimeError:
        return None
    finally:
        idle.put(reader)


# For each process, since a forked one has none of the threads of its parent's readers.
@cache
def _idle(_process: int) -> "SimpleQueue[_Reader]":
    readers = SimpleQueue[_Reader]()
    for _ in range(_READERS):
        readers.put(_Reader())
    return readers
