"""Which samples DALI alone refuses: found by halves, where a batch fails of which the host can read every sample."""

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from raydali.data.stream.stream import MicroBatch

if TYPE_CHECKING:
    from raydali.data.loading.dali_loader import DaliLoader

MAX_LOADS = 100
"""Batches that are tried; where more are needed something else is amiss, such as the GPU's memory."""

Keys = Sequence[tuple[int, int]]


def undecodable(loader: "DaliLoader", keys: Keys) -> list[int]:
    """Ids of the samples, of these (id, epoch), that DALI cannot load even alone; none where they are many."""
    found: list[int] = []
    waiting, loads = [[*dict.fromkeys(keys)]], 0
    while waiting and loads < MAX_LOADS:
        part, loads = waiting.pop(), loads + 1
        if _loads(loader, part):
            continue
        if len(part) == 1:
            found.append(part[0][0])
        else:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
    gc.collect()
    return [] if waiting else [*dict.fromkeys(found)]


def _loads(loader: "DaliLoader", keys: Keys) -> bool:
    from raydali.data.loading.dali_loader import READ_OPERATOR, DaliLoader

    class Bare(DaliLoader):
        def _find_broken(self, waiting: list[MicroBatch]) -> bool:
            return False

        def _collect(self) -> None:
            gc.collect(1)  # it is young, and the whole takes longer than all the rest

        def _recover(self, error: RuntimeError) -> None:
            if READ_OPERATOR in str(error):
                super()._recover(error)
            else:
                raise _Refused from error

    ids, epochs = np.array(keys).T
    order = Once(MicroBatch(0, 0, 0, ids, epochs))
    with Bare(
        loader.source, loader.pipeline, order, device=loader.device, threads=loader.threads, prefetched=1
    ) as alone:
        try:
            list(alone)
        except _Refused:
            return False
    return True


class _Refused(Exception):
    """DALI's error, and nobody else's."""


class Once:
    """An order of one micro-batch."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self.samples, self._micro_batch = len(micro_batch.ids), micro_batch

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator[MicroBatch]:
        """That one."""
        yield self._micro_batch
