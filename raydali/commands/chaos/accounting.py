"""What faults cost a run: how long, which steps, which samples. Pure: from events, checkpoints and ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOSS_TOLERANCE, LOSS_FLOOR = 0.05, 0.02
"""How far an epoch's mean loss may be from the undisturbed run's: such a share of it, or so much in all. Other numbers
of workers add up floating-point numbers in another order, and training makes the difference grow."""

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """What one fault did to the run; times in seconds since 1970.

    Attributes:
        fault: its name.
        at: when it was inflicted.
        step: the newest checkpoint's at that time.
        reached: the last step that was done at that time, about.
        noticed: when an event first named it.
        noticed_by: that event, or what else showed it.
        resumed: when the first step behind it was done; of a full disk, when a checkpoint could be saved again.
        resumed_at: the step that the run went on from; None where it never stopped.
    """

    fault: str
    at: float
    step: int
    reached: int
    noticed: float
    noticed_by: str
    resumed: float
    resumed_at: int | None

    @property
    def repeated_steps(self) -> int:
        """Steps that were done again, about."""
        return 0 if self.resumed_at is None else max(0, self.reached - self.resumed_at)


def first(events: Events, names: Sequence[str], since: float) -> Mapping[str, Any] | None:
    """The first event of one of these names since a time, or None."""
    return next((row for row in events if row["event"] in names and row["time"] >= since), None)


def reached(checkpoints: Sequence[tuple[int, float]], at: float) -> int:
    """The last step that was done at a time, about: from the pace between the two newest checkpoints.

    Args:
        checkpoints: step and time of each, the newest first.
        at: seconds since 1970.
    """
    if len(checkpoints) < 2:
        return checkpoints[0][0] if checkpoints else 0
    (step, when), (before, earlier) = checkpoints[:2]
    every, pace = step - before, (step - before) / max(when - earlier, 1e-3)
    return step + min(every, int(pace * max(0.0, at - when)))


@dataclass(frozen=True)
class Samples:
    """Which samples were trained on, in the order of the stream.

    Attributes:
        steps, ids: of each sample, int64 (n,).
    """

    steps: NDArray[np.int64]
    ids: NDArray[np.int64]

    def within(self, low: int, high: int) -> "Counter[tuple[int, int]]":
        """How often each (step, id) comes in steps low..high-1."""
        chosen = (self.steps >= low) & (self.steps < high)
        return Counter(zip(self.steps[chosen].tolist(), self.ids[chosen].tolist(), strict=True))


def lost_and_repeated(reference: Samples, committed: Samples, low: int, high: int) -> tuple[int, int]:
    """How many samples of steps low..high-1 are missing, and how many are there that should not be."""
    wanted, found = reference.within(low, high), committed.within(low, high)
    return (wanted - found).total(), (found - wanted).total()


def shares(suffered: Sequence[FaultOutcome], steps: int) -> list[tuple[int, int]]:
    """The steps that each fault answers for, [low, high): from the checkpoint before it to that of the next one."""
    lows = [0, *(each.step for each in suffered[1:])]
    return list(zip(lows, [*lows[1:], steps], strict=True))


@dataclass(frozen=True)
class Losses:
    """Mean losses of epochs, of the undisturbed run and of the disturbed one."""

    undisturbed: list[float]
    disturbed: list[float]

    @property
    def differences(self) -> NDArray[np.float64]:
        """Of the epochs that both have, as shares of what is tolerated; NaN where a loss is no number."""
        epochs = min(len(self.undisturbed), len(self.disturbed))
        wanted = np.asarray(self.undisturbed[:epochs], np.float64)
        found = np.asarray(self.disturbed[:epochs], np.float64)
        return np.abs(found - wanted) / np.maximum(LOSS_TOLERANCE * np.abs(wanted), LOSS_FLOOR)

    @property
    def agree(self) -> bool:
        """Whether no epoch is missing, and all differ by no more than is tolerated."""
        return len(self.undisturbed) == len(self.disturbed) and bool((self.differences <= 1).all())

    @property
    def largest(self) -> float:
        """The largest difference, absolute."""
        pairs = zip(self.undisturbed, self.disturbed, strict=False)
        return max((abs(a - b) for a, b in pairs), default=0.0)
