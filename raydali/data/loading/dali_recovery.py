"""Finds the samples on which DALI failed. DALI reports only that a batch failed, not on which of its samples.

the batches in flight  -->  decoded on the host (quarantine.py)  -->  broken, if DALI cannot decode them either
-->  by DALI, in smaller and smaller parts  -->  broken, though the host can decode them
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from raydali.data.loading.quarantine import Quarantine
from raydali.data.stream.stream import MicroBatch
from raydali.errors import StorageAway

READ_OPERATOR = "`nvidia.dali.fn.io.file.read`"
"""The operator that reads files, as DALI's errors name it. Its failure is no sign of broken contents."""
MAX_LOADS = 100
"""Batches that are tried. If more are needed, the cause is another one, such as the GPU's memory."""

Keys = Sequence[tuple[int, int]]
"""Pairs of id and the key of its draws: its epoch and its repeat."""


class UndecodableError(Exception):
    """DALI failed on the contents of a batch."""


class Recovery:
    """Finds the samples on which DALI failed, and records them in the loader's quarantine.

    Args:
        quarantine: the loader's.
        decodes: whether DALI decodes these samples as one batch. None for the loader that tries this: it checks no
            sample, and raises `UndecodableError`.
    """

    def __init__(self, quarantine: Quarantine, decodes: Callable[[Keys], bool] | None) -> None:
        self._quarantine, self._decodes = quarantine, decodes
        self._patience = quarantine.patience()

    def find_cause(self, error: RuntimeError, in_flight: list[MicroBatch]) -> None:
        """Find the broken samples of the batches in flight, or wait for the storage, so that they can be loaded again.

        Raises:
            DataError: see Quarantine.
            StorageAway: DALI could read no batch for a minute, and the files are sound.
            UndecodableError: see `decodes`.
            RuntimeError: the error itself, if the samples are not its cause.
        """
        is_read = READ_OPERATOR in str(error)
        if self._decodes is None and not is_read:
            raise UndecodableError from error
        if not in_flight:
            raise error
        if self.find_broken(in_flight):
            return
        reason = " ".join(str(error).split())
        if is_read:
            if not self._patience.pause(error):
                raise StorageAway(f"DALI cannot read the data: {reason}") from error
            return
        # Pillow can decode them all: look for files that DALI cannot.
        blamed = self._undecodable(keys_of(in_flight))
        if not blamed:
            raise error
        for id in blamed:
            self._quarantine.mark_broken(id, f"Pillow can decode it, DALI cannot: {reason[:200]}")

    def find_broken(self, batches: list[MicroBatch]) -> bool:
        """Check the samples of batches on the host, and record the broken ones; return whether there are any.

        The verdict on a sample must not depend on its neighbours. A sample that Pillow cannot decode is given to DALI:
        it is not broken if DALI decodes it in a batch in which nothing else fails.
        """
        if self._decodes is None:
            return False
        keys = keys_of(batches)
        found, errors = self._quarantine.examine_certain(id for id, _ in keys)
        if found or not errors:
            return found
        blamed = self._undecodable([key for key in keys if key[0] in errors])
        for id in blamed:
            self._quarantine.mark_broken(id, errors[id])
        return bool(blamed)

    def end(self) -> None:
        """Be told that DALI can read again, or will read no more."""
        self._patience.end()

    def _undecodable(self, keys: Keys) -> list[int]:
        assert self._decodes is not None
        blamed = undecodable(keys, self._decodes)
        gc.collect()  # the loaders that tried
        return blamed


def undecodable(keys: Iterable[tuple[int, int]], loads: Callable[[Keys], bool]) -> list[int]:
    """Return the ids of the samples that fail in a batch of one; an empty list if MAX_LOADS tries do not suffice.

    Args:
        keys: of the samples.
        loads: whether these samples can be loaded as one batch.
    """
    found: list[int] = []
    waiting, tried = [[*dict.fromkeys(keys)]], 0
    while waiting and tried < MAX_LOADS:
        part, tried = waiting.pop(), tried + 1
        if loads(part):
            continue
        if len(part) == 1:
            found.append(part[0][0])
        else:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
    return [] if waiting else [*dict.fromkeys(found)]


class Once:
    """An order of one micro-batch."""

    def __init__(self, keys: Keys) -> None:
        ids, epochs = np.array(keys).T
        self.samples, self._micro_batch = len(ids), MicroBatch(0, 0, 0, ids, epochs)

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the one micro-batch."""
        yield self._micro_batch


def keys_of(micro_batches: Iterable[MicroBatch]) -> list[tuple[int, int]]:
    """Return the ids that are read, substitutes included, with the keys of their draws."""
    return [key for one in micro_batches for key in zip(one.read_ids.tolist(), one.draw_keys.tolist(), strict=True)]
