"""Measures the ceiling of a run at each start, and again if it cannot be right.

A resume takes it from the checkpoint if it was measured under the same conditions.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from raydali.launch.worker.run_state import RunState
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.measure.ceiling import MAX_FOREIGN, Ceiling, share_of_ceiling
from raydali.measure.costs import contended_node
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.messages import Note
from raydali.text import rate_text

MAX_MEASURED_AGAIN = 3
"""Maximum number of repeated measurements per worker group. On a CPU, one also needs an epoch in which other processes
used less of it than MAX_FOREIGN, and after a void repetition half as much as before that one."""


class RunCeiling:
    """The measurement of a run's ceiling, on one rank. All ranks must call the same methods.

    The measured ceiling is stored in the RunState.

    Args:
        warm_up: yields a number of warm-up steps, then measures the ceiling if requested, and undoes all these steps.
    """

    def __init__(
        self, session: Session, state: RunState, warm_up: Callable[[int, bool], Generator[Step, None, Ceiling]]
    ) -> None:
        self._session, self._state, self._warm_up = session, state, warm_up
        self._is_void, self._measured_again, self._quiet_below = False, 0, MAX_FOREIGN

    def begin(self, steps: int, *, measures: bool, doing: Sequence[str], event: type[Rehearsed]) -> Iterator[Step]:
        """Yield the warm-up steps before the first step, or the first one of another size, and report their purpose.

        Args:
            steps: number of steps before the measurement.
            measures: whether the ceiling is measured.
            doing: other purposes of the warm-up steps.
            event: the event that reports their end.
        """
        measuring = ["measuring the ceiling (--no-ceiling leaves it out)"] if measures else []
        self._session.emit_once(Note(f"warm-up steps on one batch: {', '.join([*doing, *measuring]) or 'tuning'}"))
        began = time.perf_counter()
        measured = yield from self._warm_up(steps, measures)
        self._state.ceiling = measured.images_per_second or self._state.ceiling
        self._state.gpu_busy = measured.gpu_busy or self._state.gpu_busy
        self._is_void, self._measured_again, self._quiet_below = measured.void, 0, MAX_FOREIGN
        if measured.void:
            again = "it is measured again once they use less"
            self._session.emit_once(Note(f"the ceiling is void: {measured.why}; {again}"))
        elif measured.why:
            self._session.emit_once(Note(f"the ceiling is not measured: {measured.why}"))
        self._session.emit_once(event(**_measured(measured.images_per_second, began)))

    def doubt(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Measure again if the machine was busy in the last measurement, or if the epoch was faster than the ceiling.

        It yields the steps of the measurement. Their time belongs to no epoch.

        Args:
            record: the epoch's record.
        """
        ceiling = self._state.ceiling
        is_wrong = ceiling is not None and _disproves(record, ceiling)
        is_void = is_wrong or (ceiling is None and self._is_void)
        _, load = contended_node(record["ranks"] if self._session.worker.device.type == "cpu" else ())
        measures = is_void and self._measured_again < MAX_MEASURED_AGAIN and load < self._quiet_below
        is_wrong, measures = self._session.worker.from_first((is_wrong, measures))  # of all ranks, rank 0 decides
        if is_wrong:
            self._state.ceiling = self._state.gpu_busy = None
            if ceiling is not None and not self._is_void:
                slower = "the epoch was faster, so the machine was busy when the ceiling was measured"
                void = f"the ceiling of {rate_text(ceiling)} images/s is void: {slower}. It will be measured again"
                self._session.emit_once(Note(void))
            self._is_void = True
        if measures:
            self._measured_again += 1
            began = time.perf_counter()
            measured = yield from self._warm_up(1, True)
            self._state.ceiling, self._state.gpu_busy = measured.images_per_second, measured.gpu_busy
            if measured.void:
                self._quiet_below = load / 2
            self._session.emit_once(CeilingMeasured(**_measured(self._state.ceiling, began)))


def _measured(ceiling: float | None, began: float) -> dict[str, Any]:
    return {"ceiling_images_per_second": ceiling, "rehearsal_seconds": round(time.perf_counter() - began, 3)}


def _disproves(record: Mapping[str, Any], ceiling: float) -> bool:
    """Return whether an epoch was faster than the ceiling allows; False if the number of ranks changed during it."""
    if len({rank["world_size"] for rank in record["ranks"]}) > 1:
        return False
    rate = record["images_per_second"]
    return bool(rate) and share_of_ceiling(rate, ceiling) is None
