"""A clock that attributes every second to exactly one stage."""

import time
from collections import defaultdict, deque

import torch


class StageClock:
    """A clock that adds up the time spent in named stages. To enter a stage ends the previous one.

    On a GPU it records CUDA events on the current stream. Durations are therefore those of the device, nothing is
    synchronised while a stage runs, and "loader_wait" is the time for which the device, not the host, waited for data.
    On a CPU it uses the host's monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: deque[tuple[str, torch.cuda.Event | float]] = deque()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._ended: defaultdict[str, int] = defaultdict(int)
        self._shortest: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """End the running stage and begin this one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((stage, event))
        else:
            self._marks.append((stage, time.perf_counter()))
        self._add_up(wait=False)

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage until now, including the running one. It waits for the device."""
        if self._marks:
            self.enter(self._marks[-1][0])
            self._add_up(wait=True)
        return dict(self._totals)

    def so_far(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the number of runs of each stage that the device has finished. It never waits."""
        self._add_up(wait=False)
        return dict(self._totals), dict(self._ended)

    def shortest(self, stage: str) -> float | None:
        """Return the seconds of the shortest run of a stage; call `totals` or `so_far` before to include new runs."""
        return self._shortest.get(stage)

    def latest(self, stage: str) -> float | None:
        """Return the seconds of the last run of a stage; call `totals` or `so_far` before to include new runs."""
        return self._latest.get(stage)

    def reset(self) -> None:
        """Start again from zero; the running stage continues from now."""
        self.totals()
        self._totals.clear()
        self._ended.clear()
        self._shortest.clear()
        self._latest.clear()

    def _add_up(self, *, wait: bool) -> None:
        while len(self._marks) > 1:
            (stage, begin), (_, end) = self._marks[0], self._marks[1]
            if isinstance(begin, float) or isinstance(end, float):
                seconds = end - begin  # type: ignore[operator]  # both are floats on a CPU
            else:
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                seconds = begin.elapsed_time(end) / 1000
            self._totals[stage] += seconds
            self._ended[stage] += 1
            self._latest[stage] = seconds
            self._shortest[stage] = min(seconds, self._shortest.get(stage, seconds))
            self._marks.popleft()
