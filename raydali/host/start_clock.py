"""The time from the command to the first step, by phase: the driver and rank 0 mark where each phase ends.

    driver    imports, index, cluster
    rank 0    workers, worker start, process group, model, compile, capture, ceiling, validation, first batch,
              first step

The marks belong to the process, since the driver has begun before any object exists. They are wall-clock times, so that
the marks of two processes can be joined; clocks of two nodes may differ.
"""

import time
from collections.abc import Sequence

import psutil

Mark = tuple[str, float]
"""The name of a phase, and the time at which it ended."""

_marks: list[Mark] = []


def begin(at: float) -> None:
    """Let the first phase begin at this time: before it, the process was another command."""
    _marks.append(("", at))


def mark(phase: str) -> None:
    """Mark the end of a phase. The first one of a process began with the process."""
    if not _marks:
        _marks.append(("", psutil.Process().create_time()))
    _marks.append((phase, time.time()))


def marks() -> list[Mark]:
    """Return the marks of this process, for a worker that it starts."""
    return [*_marks]


def join(before: Sequence[Mark]) -> None:
    """Put the marks of the driver before the marks of this worker. In between is the phase `workers`."""
    if before and _marks:
        _marks[:] = [*before, ("workers", _marks[0][1]), *_marks[1:]]


def phases() -> dict[str, float]:
    """Return the duration of each phase, in seconds, and forget the marks; phases of one name are added up."""
    durations: dict[str, float] = {}
    last = _marks[0][1] if _marks else 0.0
    for phase, at in _marks[1:]:
        durations[phase] = round(durations.get(phase, 0.0) + max(0.0, at - last), 3)
        last = max(last, at)
    _marks.clear()
    return durations
