"""Metrics of `raydali bench goodput`: pure functions of the finished steps and the kills."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydali.bench.goodput.recording import FinishedStep  # imports torch: seconds

VARIATION = 0.25
"""The largest distance of a kill from its regular time, as a share of the time between two."""


@dataclass(frozen=True)
class Measured:
    """A contender's run.

    Attributes:
        finished: the finished steps of all ranks by time.
        end: when the last step was finished or the time had expired, in seconds since 1970.
        kills: times of the kills until then.
        lost, repeated: samples that are missing in the trained ones, and that are there too often.
    """

    finished: "Sequence[FinishedStep]"
    end: float
    kills: Sequence[float]
    lost: int
    repeated: int

    @property
    def start(self) -> float:
        """The end of the first step, in seconds since 1970."""
        return self.finished[0].time

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first step to the end."""
        return self.end - self.start

    @property
    def reached(self) -> int:
        """The highest step that was finished."""
        return max(row.step for row in self.finished)


def kill_times(every: float, seed: int) -> Iterator[tuple[float, int]]:
    """Yield the seconds from the first step to each kill, and a number that chooses the rank. It does not end.

    Args:
        every: mean seconds between two kills; the times vary, so that they do not fall on the same steps of a period.
        seed: the same seed gives the same kills.
    """
    drawn = random.Random(seed)
    number = 0
    while number := number + 1:
        yield every * (number + drawn.uniform(-VARIATION, VARIATION)), drawn.randrange(1 << 16)


def progress(finished: "Sequence[FinishedStep]") -> list[tuple[float, int]]:
    """Return the time and the step when the run finished each step: when its first rank did."""
    first = finished[:1]
    return [(row.time, row.step) for row in [*first, *(b for a, b in pairwise(finished) if a.step != b.step)]]


def done_again(finished: "Sequence[FinishedStep]") -> int:
    """Return how many steps were done more than once, each counted as often as the rank that repeated it most."""
    times = Counter((row.rank, row.step) for row in finished)
    most: Counter[int] = Counter()
    for (_, step), count in times.items():
        most[step] = max(most[step], count)
    return most.total() - len(most)


def missing_ranks(finished: "Sequence[FinishedStep]", workers: int) -> int:
    """Return in how many steps a rank had no part, summed over ranks."""
    known: dict[int, int] = {}
    ranks: dict[int, set[int]] = {}
    for row in finished:
        known[row.step] = max(known.get(row.step, 0), row.participants)
        ranks.setdefault(row.step, set()).add(row.rank)
    return sum(workers - (known[step] or len(ranks[step])) for step in known)


def pauses(finished: "Sequence[FinishedStep]", kills: Sequence[float], end: float) -> list[float]:
    """Return for each kill the longest time without a finished step, from the kill to the next one or the end.

    The first step after a kill may be one that the others were about to finish, so it does not end the disturbance.
    """
    times = [row.time for row in finished]
    found = []
    for kill, following in pairwise([*kills, float("inf")]):
        after = [at for at in times if at > kill]
        until = [at for at in after if at <= following] or after[:1] or [end]
        found.append(max(b - a for a, b in pairwise([kill, *until])))
    return found


def _step_seconds(measured: Measured) -> float:
    return median(b - a for (a, _), (b, _) in pairwise(progress(measured.finished)))


METRICS: dict[str, Callable[[Measured], Any]] = {
    "reached": lambda measured: measured.reached,
    "seconds": lambda measured: round(measured.seconds, 2),
    "step_seconds": lambda measured: round(_step_seconds(measured), 4),
    "kills": lambda measured: [round(at - measured.start, 2) for at in measured.kills],
    "pause_seconds": lambda measured: (
        round(mean(pauses(measured.finished, measured.kills, measured.end)), 2) if measured.kills else None
    ),
    "steps_done_again": lambda measured: done_again(measured.finished),
    "lost": lambda measured: measured.lost,
    "repeated": lambda measured: measured.repeated,
    "progress": lambda measured: [(round(at - measured.start, 3), step) for at, step in progress(measured.finished)],
}
"""Metrics of a row: the highest step; seconds from the first step to the last one, or until the time had expired; the
median seconds of a step; the kills, in seconds from the first step; the mean of `pauses`; samples lost and repeated;
seconds and number of each finished step."""


def goodput(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the ratio of a row's steps per second to the undisturbed run's; None if one of them was not measured."""
    undisturbed = next((each for each in rows if each["contender"] == "undisturbed"), None)
    if undisturbed is None or not (undisturbed["seconds"] and row["seconds"]):
        return None
    return float(row["reached"] / row["seconds"] / (undisturbed["reached"] / undisturbed["seconds"]))
