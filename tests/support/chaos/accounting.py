"""The cost of faults in time, steps and samples, from events, checkpoints and ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.stream import Stream
from raydali.run.folder import CONFIG, RunFolder
from tests.support.traces import read_samples

LOSS_TOLERANCE = 1e-6
"""The tolerated relative deviation of an epoch's mean loss from that of the undisturbed run, in float64. Another number
of workers adds floating-point numbers in another order, and training may amplify the difference."""

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """The effect of one fault on the run; times in seconds since 1970.

    Attributes:
        fault: the fault's name.
        at: time of the injection.
        step: step of the newest checkpoint at that time.
        reached: estimate of the last completed step at that time.
        noticed: time of the detection.
        noticed_by: the event, or another sign, by which the fault was detected.
        resumed: time of the first completed step after the fault; for a full disk, of the first saved checkpoint.
        resumed_at: step from which the run resumed; None if no rank stopped.
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
        """The estimated number of steps that were repeated."""
        return 0 if self.resumed_at is None else max(0, self.reached - self.resumed_at)


def first(events: Events, names: Sequence[str], since: float) -> Mapping[str, Any] | None:
    """Return the first event with one of these names since a time, or None."""
    return next((row for row in events if row["event"] in names and row["time"] >= since), None)


def reached(checkpoints: Sequence[tuple[int, float]], at: float) -> int:
    """Estimate the last completed step at a time, from the pace between the two newest checkpoints.

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
    """Samples that were trained on, in the order of the stream.

    Attributes:
        steps, ids: step and id of each sample, int64 (n,).
    """

    steps: NDArray[np.int64]
    ids: NDArray[np.int64]

    def within(self, low: int, high: int) -> "Counter[tuple[int, int]]":
        """Return the number of times that each (step, id) occurs in steps low..high-1."""
        chosen = (self.steps >= low) & (self.steps < high)
        return Counter(zip(self.steps[chosen].tolist(), self.ids[chosen].tolist(), strict=True))


def due_and_trained(folder: RunFolder) -> tuple[Samples, Samples]:
    """Return the samples that a run has to train on, by its settings, and those that it trained on, by its trace."""
    settings = folder.read_json(CONFIG)
    names = ["samples", "epochs", "batch_size", "global_batch_size", "seed", "shuffle_block", "shuffle_apart"]
    names.append("order_batch_size")
    stream = Stream(**{name: settings[name] for name in names}, shuffle_window=settings["shuffle_window"] or 0)
    batches = list(stream.micro_batches(0, 1))
    steps = np.repeat([batch.step for batch in batches], [len(batch.ids) for batch in batches])
    table = read_samples(folder)
    return (
        Samples(steps, np.concatenate([batch.ids for batch in batches])),
        Samples(table["step"].to_numpy(), table["id"].to_numpy()),
    )


def lost_and_repeated(reference: Samples, committed: Samples, low: int, high: int) -> tuple[int, int]:
    """Return the numbers of missing and of repeated samples in steps low..high-1."""
    wanted, found = reference.within(low, high), committed.within(low, high)
    return (wanted - found).total(), (found - wanted).total()


def shares(outcomes: Sequence[FaultOutcome], steps: int) -> list[tuple[int, int]]:
    """Return the steps [low, high) attributed to each fault: from its checkpoint to that of the next fault."""
    lows = [0, *(each.step for each in outcomes[1:])]
    return list(zip(lows, [*lows[1:], steps], strict=True))


@dataclass(frozen=True)
class Losses:
    """Mean losses of the epochs of the undisturbed and of the disturbed run."""

    undisturbed: list[float]
    disturbed: list[float]

    @property
    def agree(self) -> bool:
        """True if no epoch is missing and all differences are tolerated."""
        return len(self.undisturbed) == len(self.disturbed) and self.largest <= LOSS_TOLERANCE

    @property
    def largest(self) -> float:
        """The largest difference of an epoch, as a share of its loss; NaN if a loss is NaN."""
        pairs = zip(self.undisturbed, self.disturbed, strict=False)
        return float(np.max([abs(a - b) / max(abs(a), LOSS_TOLERANCE) for a, b in pairs], initial=0))
