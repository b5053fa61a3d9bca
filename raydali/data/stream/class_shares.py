"""Gives rare classes more places of an epoch: each class and each id the floor or the ceiling of its share, N in all.

    shares    |-a-|---b---|-c-|-----d-----|     of the ids, class by class, in units of a place
    counts      1     2     1       2           points one unit apart, which each epoch moves by a part of a unit
    places    b b d d a c ...                   N of them, the ids in another order, of random classes
    passes    every C-th place: an id of at most C places comes at most once in a pass

Passes follow each other in an order in which neighbours among the places are far apart in time. Each pass shuffles both
halves of its places. So an id comes again after more than half of a pass, and in another global batch.

The points are those of systematic sampling (Madow, "On the theory of systematic sampling, II", 1949). Their offset is
the golden rotation, so that an id with a share of 2.4 has 2.4 places in the mean of few epochs.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raydali.data.stream.counter_rng import keyed
from raydali.data.stream.permutation import Permutation
from raydali.errors import UsageError

THRESHOLD = 0.001
"""Usual share of the samples below which `sqrt` gives a class more places; Gupta et al. use it for LVIS."""
_UNIT = 1 << 20
"""The length of a point's place on the line."""
_GOLDEN = round(_UNIT * (math.sqrt(5) - 1) / 2)
_SALT = 0xC1A55


@dataclass(frozen=True)
class ClassSampling:
    """How many places the classes get.

    balanced: the same number for each class. sqrt: a class with a share f of the samples gets max(1, sqrt(t / f)) times
    its places, before all are scaled to N: the repeat factors of Gupta, Dollar and Girshick, "LVIS: a dataset for large
    vocabulary instance segmentation" (CVPR 2019).

    Args:
        threshold: t of sqrt; None: balanced.
    """

    threshold: float | None

    @classmethod
    def parse(cls, option: str) -> "ClassSampling":
        """Return what `--class-sampling` gives: balanced, sqrt or sqrt:THRESHOLD.

        Raises:
            UsageError: it gives something else.
        """
        kind, colon, threshold = option.partition(":")
        try:
            number = float(threshold) if colon else THRESHOLD
            if kind == "sqrt" and 0 < number <= 1:
                return cls(number)
        except ValueError:
            pass
        if option == "balanced":
            return cls(None)
        raise UsageError(f"--class-sampling must be balanced, sqrt or sqrt:SHARE with a share up to 1, not {option}")

    def shares(self, counts: NDArray[np.int64]) -> list[int]:
        """Return the share of each sample of classes with so many samples, in units; they sum up to at most N units."""
        whole = int(counts.sum())
        if self.threshold is None:
            return [whole * _UNIT // (len(counts) * count) for count in counts.tolist()]
        factors = [int(_UNIT * max(1.0, math.sqrt(self.threshold * whole / count))) for count in counts.tolist()]
        total = sum(factor * count for factor, count in zip(factors, counts.tolist(), strict=True))
        return [whole * _UNIT * factor // total for factor in factors]


def check_alone(repeats: int, shuffle_block: int | None) -> None:
    """Refuse other orders beside class sampling. Raises UsageError."""
    for option, value in (("--repeats", repeats if repeats > 1 else 0), ("--shuffle-block", shuffle_block)):
        if value:
            raise UsageError(f"--class-sampling and {option} {value} exclude each other: give only one of them")


class ClassShares:
    """The shares of a run's ids, see above.

    Args:
        labels: (N,), the number of the class of each sample.
        sampling: gives the shares.
        seed: the key of the order.

    Attributes:
        seed: see the argument.
        most: the maximum number of places of an id in an epoch.
        ids: in the order of the shares.
        ends: of their shares, in units.
        line: the ids in the order of the places.
    """

    def __init__(self, labels: NDArray[np.int64], sampling: ClassSampling, seed: int) -> None:
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        of_classes, size = np.array(sampling.shares(counts), np.int64), len(labels)
        self.seed, self.line = seed, np.argsort(keyed(_SALT, seed, np.arange(size)), kind="stable")
        self.ids = self.line[np.argsort(classes[self.line], kind="stable")]
        self.ends = np.cumsum(of_classes[classes[self.ids]])
        self.ends += (size * _UNIT - self.ends[-1]) * np.arange(1, size + 1) // size
        self.most = int(-(-np.diff(self.ends, prepend=0).max() // _UNIT))

    def counts(self, epoch: int) -> NDArray[np.int64]:
        """Return the number of places of each id (N,) in an epoch."""
        offset = (int(keyed(_SALT, self.seed)) + epoch * _GOLDEN) % _UNIT
        counts = np.empty_like(self.ends)
        counts[self.ids] = np.diff(-((offset - self.ends) // _UNIT), prepend=0)
        return counts


class SampledEpoch:
    """The order of one epoch: called with positions, it returns the ids, and how often each came before in the epoch.

    Args:
        shares: of the run.
        epoch: the epoch.
        global_batch_size: limits the number of passes, so that half of one holds a global batch.
    """

    def __init__(self, shares: ClassShares, epoch: int, global_batch_size: int) -> None:
        self._line, self._key, size = shares.line, (shares.seed, epoch), len(shares.line)
        self._last = np.cumsum(shares.counts(epoch)[self._line])  # places up to each id of the line
        count = self._count = max(1, min(shares.most, size // (2 * global_batch_size + 2)))
        stride = next(step for step in range(max(1, round(0.618 * count)), count + 1) if math.gcd(step, count) == 1)
        self._residues = np.argsort(np.arange(count) * stride % count)  # of the passes, in the order of time
        self._sizes = (size - self._residues + count - 1) // count
        self._ends = np.cumsum(self._sizes)
        self._half = self._half_of_rows(size // count // 2)

    def __call__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and repeats (int64, the shape of positions) at positions in 0..N-1."""
        passes = np.searchsorted(self._ends, positions, side="right")
        rows = positions - self._ends[passes] + self._sizes[passes]
        second = rows >= self._half
        groups = passes * 2 + second
        for group in np.unique(groups).tolist():
            here, begin = groups == group, self._half * (group % 2)
            size = self._half if group % 2 == 0 else int(self._sizes[group // 2]) - self._half
            rows[here] = begin + _order(size, int(keyed(_SALT, *self._key, group)))(rows[here] - begin)
        places = rows * self._count + self._residues[passes]
        at = self._at(places)
        return self._line[at], places - np.where(at > 0, self._last[at - 1], 0)

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index in the line of the ids that have these places."""
        return np.searchsorted(self._last, places, side="right")

    def _half_of_rows(self, half: int) -> int:
        """Return the number of rows of the first half, near this one, that parts the places of no id."""
        while half > 1:
            before, behind = self._at(half * self._count + np.array([-1, 0])).tolist()
            if before != behind:
                break
            half -= 1
        return half


@lru_cache(maxsize=8)
def _order(size: int, key: int) -> Permutation:
    return Permutation(size, key, 0)
