"""A short run for `raydali plan`: an epoch that is closed early, a second one, and then the end.

The first epoch has the costs of a start, with a first checkpoint that takes longer than later ones; the second one has
the costs of every later epoch. Validations end early, too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raydali.data.load.loader import Batch, Loader

FIRST_SHARE = 0.25
"""Share of the time after which the first epoch is closed."""
VALIDATION_SHARE = 0.25
"""Limit of each validation, as a share of the time."""


class ShortRun:
    """When the epochs of a short run are closed. The clock of any rank decides for all, see `TrainingRun`.

    Args:
        seconds: of training and validation.

    Attributes:
        closes: whether the next step closes its epoch.
    """

    def __init__(self, seconds: float) -> None:
        began = time.monotonic()
        self._due = [began + seconds * FIRST_SHARE, began + seconds]
        self.closes = False

    @property
    def is_due(self) -> bool:
        """Return whether an epoch is to be closed by now."""
        return bool(self._due) and time.monotonic() >= self._due[0]

    def close_next(self) -> None:
        """Let the next step close its epoch. All ranks must call it at the same step."""
        self.closes = True
        del self._due[0]

    def ends_after_step(self) -> bool:
        """Note that a step is complete; return whether it has closed the last epoch."""
        closed, self.closes = self.closes, False
        return closed and not self._due


@contextmanager
def limited(loader: Loader, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Limit the time for which a loader is iterated in this context, and yield the pace of the iteration.

    Args:
        loader: the loader of the validation.
        seconds: the length of the short run; None: there is no limit, and the pace is empty.

    The pace is filled in at the end: "samples" of this rank; "all_samples" of all ranks in a whole iteration;
    "sample_seconds", the mean time of one sample after the first batch, None with a single batch.
    """
    pace: dict[str, Any] = {}
    if seconds is None:
        yield pace
        return
    times, sizes, watch = list[float](), list[int](), loader.on_batch

    def taken(batch: Batch) -> None:
        times.append(time.monotonic())
        sizes.append(len(batch.ids))
        if watch is not None:
            watch(batch)

    loader.on_batch, loader.limit_seconds = taken, seconds * VALIDATION_SHARE
    try:
        yield pace
    finally:
        loader.on_batch, loader.limit_seconds = watch, None
    between = sum(sizes[:-1])
    pace["samples"], pace["all_samples"] = sum(sizes), loader.order.samples
    pace["sample_seconds"] = (times[-1] - times[0]) / between if between else None
