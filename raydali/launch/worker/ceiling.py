"""The ceiling of a run: how fast its steps are on a batch that is on the device, or why that is not known.

Warm-up steps measure it, see rehearsal.py. It is void if other processes used the cores meanwhile, or if an epoch was
faster, and is measured again then.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydali.host.cpu_times import CpuTimes
from raydali.launch.worker.run_state import RunState
from raydali.launch.worker.session import Session
from raydali.measure.costs import contended_node
from raydali.measure.records import share_of_ceiling
from raydali.run.events import Rehearsed
from raydali.run.messages import Note
from raydali.text import rate_text
from raydali.training.worker import Worker

MEASURED_SECONDS = 1.5
"""Approximate duration of a measurement, which has at least MIN_STEPS and at most MAX_STEPS steps."""
MAX_STEPS, MIN_STEPS = 60, 3
MAX_SECONDS = 10.0
"""Maximum duration of a measurement. If one step on a CPU takes longer, no ceiling is measured."""
MAX_FOREIGN = 0.5
"""Maximum share of a saturated node's CPU time that other processes may use during the measurement. Ray and the driver
use a quarter if there are few cores. If that makes the ceiling too low, an epoch will be faster than the ceiling."""
MAX_MEASURED_AGAIN = 3
"""Maximum number of repeated measurements per worker group. On a CPU, one also needs an epoch in which other processes
used less of it than MAX_FOREIGN, and after a void repetition half as much as before that one."""
MIN_CPU_SECONDS = 0.5
"""With less CPU time, shares of it are unreliable: the kernel counts all processes in units of 0.01 s."""


@dataclass(frozen=True)
class Ceiling:
    """A measured ceiling, or the reason why there is none.

    Attributes:
        images_per_second: rate of all ranks together; None if it is not known.
        why: why it is not known or void; empty if no measurement was requested.
        void: whether it was measured on a busy machine, and must be measured again.
        gpu_busy: share of these steps in which GPUs compute, 0..1, mean over ranks; None if it was not measured.
    """

    images_per_second: float | None = None
    why: str = ""
    void: bool = False
    gpu_busy: float | None = None


class RunCeiling:
    """The ceiling of a run, on one rank, which is kept in the RunState. All ranks must call the same methods."""

    def __init__(self, session: Session, state: RunState) -> None:
        self._session, self._state = session, state
        self._is_void, self._measured_again, self._quiet_below, self._load = False, 0, MAX_FOREIGN, 0.0

    def take(self, measured: Ceiling, event: type[Rehearsed], began: float, *, again: bool = False) -> None:
        """Take the result of warm-up steps that began at this time; `again`: they only measured, see `doubts`."""
        self._state.ceiling = measured.images_per_second or self._state.ceiling
        self._state.gpu_busy = measured.gpu_busy or self._state.gpu_busy
        if not again:
            self._is_void, self._measured_again, self._quiet_below = measured.void, 0, MAX_FOREIGN
            if measured.void:
                why = f"{measured.why}; it is measured again once they use less"
                self._session.emit_once(Note(f"the ceiling is void: {why}"))
            elif measured.why:
                self._session.emit_once(Note(f"the ceiling is not measured: {measured.why}"))
        elif measured.void:
            self._quiet_below = self._load / 2
        seconds = round(time.perf_counter() - began, 3)
        ceiling = measured.images_per_second
        self._session.emit_once(event(ceiling_images_per_second=ceiling, rehearsal_seconds=seconds))

    def doubts(self, record: Mapping[str, Any]) -> bool:
        """Return whether to measure again: it was void, or the epoch with this record was faster."""
        ceiling, worker = self._state.ceiling, self._session.worker
        is_wrong = ceiling is not None and _disproves(record, ceiling)
        is_void = is_wrong or (ceiling is None and self._is_void)
        _, self._load = contended_node(record["ranks"] if worker.device.type == "cpu" else ())
        measures = is_void and self._measured_again < MAX_MEASURED_AGAIN and self._load < self._quiet_below
        is_wrong, measures = worker.from_first((is_wrong, measures))  # of all ranks, rank 0 decides
        if is_wrong:
            self._state.ceiling = self._state.gpu_busy = None
            if ceiling is not None and not self._is_void:
                slower = "the epoch was faster, so the machine was busy when the ceiling was measured"
                void = f"the ceiling of {rate_text(ceiling)} images/s is void: {slower}. It will be measured again"
                self._session.emit_once(Note(void))
            self._is_void = True
        self._measured_again += measures
        return measures


def _disproves(record: Mapping[str, Any], ceiling: float) -> bool:
    """Return whether an epoch was faster than the ceiling allows; False if the number of ranks changed during it."""
    if len({rank["world_size"] for rank in record["ranks"]}) > 1:
        return False
    rate = record["images_per_second"]
    return bool(rate) and share_of_ceiling(rate, ceiling) is None


def steps_to_measure(seconds: float) -> int:
    """Return the number of steps to measure, if one takes so many seconds."""
    return round(min(max(MEASURED_SECONDS / seconds, MIN_STEPS), MAX_STEPS, max(1.0, MAX_SECONDS / seconds)))


def on_host(worker: Worker, before: CpuTimes | None, after: CpuTimes | None) -> dict[str, str | float | None]:
    """Return what `disturbed` needs of this rank, from the CPU times before and after the measurement."""
    spent = after - before if before is not None and after is not None else None
    own, busy, idle = (spent.own, spent.busy, spent.idle) if spent and spent.busy >= MIN_CPU_SECONDS else (None,) * 3
    return {"node": worker.node, "cpu_seconds": own, "host_busy_seconds": busy, "host_idle_seconds": idle}


def disturbed(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describe how other processes used the cores while a ceiling was measured; empty if the cores were free.

    Args:
        ranks: for each rank "node", "cpu_seconds", "host_busy_seconds" and "host_idle_seconds"; None for a time that
            is not known.
    """
    node, share = contended_node(ranks)
    where = f" on node {node}" if len({rank["node"] for rank in ranks}) > 1 else ""
    return f"other processes used {share:.0%} of the CPU time{where}" if share > MAX_FOREIGN else ""
