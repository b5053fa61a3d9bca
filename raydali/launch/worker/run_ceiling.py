"""The ceiling of a run, which is measured at each start, and again if it cannot be right.

A resume takes it from the checkpoint if it was measured under the same conditions.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from raydali.launch.options import PLACEMENT_OPTIONS, TrainingOptions
from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.session import Session
from raydali.launch.worker.step import Step
from raydali.measure.ceiling import Ceiling, share_of_ceiling
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.messages import Note
from raydali.text import rate_text
from raydali.train.worker import Worker

OPTIONS_WITHOUT_STEP_COST = PLACEMENT_OPTIONS | {
    "name",
    "checkpoint_every",
    "trace_samples",
    "loader",
    "ceiling",
    "shuffle_window",
    "shuffle_apart",
    "repeats",
    "exclude",
    "max_bad_fraction",
    "val_data",
    "root",
}
"""Options that do not change the duration of a step if its batch is already on the device."""

MAX_MEASURED_AGAIN = 3
"""Maximum number of repeated measurements per worker group: other processes may always keep the machine busy."""


def ceiling_conditions(config: TrainingOptions, worker: Worker) -> dict[str, str]:
    """Return the options, workers and device that a ceiling depends on. Under other conditions it is invalid."""
    options = {name: repr(value) for name, value in asdict(config).items() if name not in OPTIONS_WITHOUT_STEP_COST}
    device = worker.device
    threads = f"{torch.get_num_threads()} threads of a CPU"
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return options | {"world_size": str(worker.world_size), "on": on}


class RunCeiling:
    """The measurement of a run's ceiling, on one rank. All ranks must call the same methods.

    The measured ceiling is stored in the RunState.

    Args:
        warm_up: yields a number of warm-up steps, then measures the ceiling if requested, and undoes all these steps.
    """

    def __init__(
        self,
        session: Session,
        state: RunState,
        warm_up: Callable[[int, bool], Generator[Step, None, Ceiling]],
    ) -> None:
        self._session, self._state, self._warm_up = session, state, warm_up
        self._is_void = False
        self._measured_again = 0

    def begin(
        self,
        steps: int,
        *,
        measures: bool,
        what: str,
        event: type[Rehearsed] = Rehearsed,
    ) -> Iterator[Step]:
        """Yield the warm-up steps before the first step, or the first one of another size, and report their purpose.

        Args:
            steps: number of steps before the measurement.
            measures: whether the ceiling is measured.
            what: other purposes of the warm-up steps; may be empty.
            event: the event that reports their end.
        """
        doing = [what] if what else []
        if measures:
            doing.append("measuring the ceiling (--no-ceiling leaves it out)")
        self._note(f"warm-up steps on one batch: {', '.join(doing) or 'tuning'}")
        began = time.perf_counter()
        measured = yield from self._warm_up(steps, measures)
        self._state.ceiling = measured.images_per_second or self._state.ceiling
        self._is_void, self._measured_again = measured.void, 0
        if measured.void:
            self._note(f"the ceiling is void: {measured.why}; it is measured again after the epoch")
        elif measured.why:
            self._note(f"the ceiling is not measured: {measured.why}")
        self._report(event, measured.images_per_second, began)

    def doubt(self, record: Mapping[str, Any]) -> Iterator[Step]:
        """Measure again if the machine was busy in the last measurement, or if the epoch was faster than the ceiling.

        It yields the steps of the measurement. Their time belongs to no epoch.

        Args:
            record: the epoch's record.
        """
        known = self._state.ceiling
        is_wrong, measures = self._session.worker.from_first(self._judge(record, known))
        if is_wrong:
            self._state.ceiling = None
            if known is not None and not self._is_void:
                slower = "the epoch was faster, so the machine was busy when the ceiling was measured"
                self._note(f"the ceiling of {rate_text(known)} images/s is void: {slower}. It will be measured again")
            self._is_void = True
        if measures:
            self._measured_again += 1
            began = time.perf_counter()
            self._state.ceiling = (yield from self._warm_up(1, True)).images_per_second
            self._report(CeilingMeasured, self._state.ceiling, began)

    def _judge(self, record: Mapping[str, Any], known: float | None) -> tuple[bool, bool]:
        """Return whether the ceiling is wrong, and whether it is to be measured again; rank 0 decides."""
        is_wrong = known is not None and _disproves(record, known)
        is_void = is_wrong or (known is None and self._is_void)
        return is_wrong, is_void and self._measured_again < MAX_MEASURED_AGAIN

    def _note(self, text: str) -> None:
        if self._session.worker.rank == 0:
            self._session.emit(Note(text))

    def _report(self, event: type[Rehearsed], ceiling: float | None, began: float) -> None:
        if self._session.worker.rank == 0:
            seconds = round(time.perf_counter() - began, 3)
            self._session.emit(event(ceiling_images_per_second=ceiling, rehearsal_seconds=seconds))


def _disproves(record: Mapping[str, Any], ceiling: float) -> bool:
    """Return whether an epoch was faster than the ceiling allows; False if the number of ranks changed during it."""
    if len({rank["world_size"] for rank in record["ranks"]}) > 1:
        return False
    rate = record["images_per_second"]
    return bool(rate) and share_of_ceiling(rate, ceiling) is None
