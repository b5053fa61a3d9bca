"""A run's ceiling: measured before its first step, doubted where an epoch is faster, and then measured again."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.session import Session
from raydali.measure.ceiling import Ceiling, share_of_ceiling
from raydali.run.events import CeilingMeasured, Note, Rehearsed

MAX_MEASURED_AGAIN = 3
"""Times, of a start: a machine may be busy with other things all the time."""


class RunCeiling:
    """One rank's part; all ranks must call the same methods. The ceiling itself is the run's state.

    Args:
        rehearse: takes so many steps to warm up, measures the ceiling behind them if it is to, and leaves no trace.
    """

    def __init__(self, session: Session, state: RunState, rehearse: Callable[[int, bool], Ceiling]) -> None:
        self._session, self._state, self._rehearse = session, state, rehearse
        self._is_void = False  # or it was once
        self._measured_again = 0

    def begin(self, warm_up: int, *, measures: bool, what: str) -> None:
        """Rehearse before the first step, and say so before.

        Args:
            warm_up: steps.
            what: this is good for beside measuring, in words.
        """
        doing = [what] * bool(what) + ["measuring the ceiling (--no-ceiling leaves it out)"] * measures
        self._note(f"rehearsing steps on one batch: {', '.join(doing) or 'warming up'}")
        began = time.perf_counter()
        measured = self._rehearse(warm_up, measures)
        self._state.ceiling = measured.images_per_second or self._state.ceiling
        self._is_void = measured.void
        if measured.void:
            self._note(f"the ceiling is void: {measured.why}; it is measured again behind the epoch")
        elif measured.why:
            self._note(f"the ceiling is not measured: {measured.why}")
        self._report(Rehearsed, measured.images_per_second, began)

    def doubt(self, record: Mapping[str, Any] | None, *, is_last: bool) -> None:
        """Measure again after an epoch where the machine was busy, or the epoch faster. It counts to no epoch's time.

        Args:
            record: the epoch's, on rank 0.
            is_last: no epoch follows.
        """
        known = self._state.ceiling
        if known is not None and self._session.worker.from_first(_disproves(record, known)):
            self._state.ceiling = None
            if not self._is_void:
                slowed = "the epoch was faster, so something slowed the machine down while it was measured"
                self._note(f"the ceiling of {known:.3g} images/s is void: {slowed}; it is measured again")
            self._is_void = True
        is_due = self._is_void and not is_last and self._measured_again < MAX_MEASURED_AGAIN
        if self._state.ceiling is None and is_due:
            self._measured_again += 1
            began = time.perf_counter()
            self._state.ceiling = self._rehearse(1, True).images_per_second
            self._report(CeilingMeasured, self._state.ceiling, began)

    def _note(self, text: str) -> None:
        if self._session.worker.rank == 0:
            self._session.emit(Note(text))

    def _report(self, event: type[Rehearsed], ceiling: float | None, began: float) -> None:
        if self._session.worker.rank == 0:
            seconds = round(time.perf_counter() - began, 3)
            self._session.emit(event(ceiling_images_per_second=ceiling, rehearsal_seconds=seconds))


def _disproves(record: Mapping[str, Any] | None, ceiling: float) -> bool:
    """Return whether an epoch, of ranks that were as many throughout, was faster than a ceiling can be."""
    if record is None or len({rank["world_size"] for rank in record["ranks"]}) > 1:
        return False
    rate = record["images_per_second"]
    return bool(rate) and share_of_ceiling(rate, ceiling) is None
