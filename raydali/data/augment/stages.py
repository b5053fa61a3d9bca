"""The stages of an augmentation policy: which operations an image gets, in which order and how strongly.

A policy is a sequence of stages, and a stage fills one or more slots of an image with an operation each:

    uniforms (N, numbers)  --stage.draw-->  rows (N, slots, WIDTH), see operations.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from raydali.data.augment.operations import OPERATIONS, WIDTH, Floats, Rows

BINS = 31
"""Number of levels of a magnitude, as in torchvision."""


@dataclass(frozen=True)
class Operation:
    """An operation with its range.

    Args:
        name: a key of OPERATIONS.
        magnitude: returns the magnitudes of levels (N,) in 0..1, for images of this height and width.
        signed: whether the magnitude is negated with probability 1/2.
        probability: of being applied where it is chosen.
    """

    name: str
    magnitude: Callable[[Floats, int], Floats] = lambda level, side: level
    signed: bool = False
    probability: float = 1.0

    def rows(self, level: Floats, sign: Floats, side: int) -> Rows:
        """Return the rows (N, WIDTH) of these levels (N,); a sign (N,) is a uniform number."""
        magnitude = self.magnitude(level, side)
        return OPERATIONS[self.name](np.where(self.signed & (sign < 0.5), -magnitude, magnitude), side)


def in_bins(first: Floats, second: Floats) -> Floats:
    """Return levels that are one of BINS, with equal probability."""
    return np.floor(first * BINS) / (BINS - 1)


def continuous(first: Floats, second: Floats) -> Floats:
    """Return levels that are uniform in 0..1."""
    return first


@dataclass(frozen=True)
class OneOf:
    """One of several lists of operations, which fill as many slots, with equal probability for each list.

    Args:
        lists: the lists.
        level: the level of all operations of an image, from two uniforms (N,).
        probability: of applying any list.
    """

    lists: Sequence[Sequence[Operation]]
    level: Callable[[Floats, Floats], Floats] = in_bins
    probability: float = 1.0

    @property
    def slots(self) -> int:
        """The number of operations that an image gets."""
        return max(map(len, self.lists))

    @property
    def numbers(self) -> int:
        """The number of uniforms for each image."""
        return 3 + 2 * self.slots

    def draw(self, uniforms: Floats, side: int) -> Rows:
        """Return rows (N, slots, WIDTH) of uniforms (N, numbers), for images of this height and width."""
        chosen, level = np.floor(uniforms[:, 0] / self.probability * len(self.lists)), self.level(*uniforms[:, 1:3].T)
        rows = np.zeros((len(uniforms), self.slots, WIDTH), np.float32)
        for index, operations in enumerate(self.lists):
            for slot, operation in enumerate(operations):
                sign, applied = uniforms[:, 3 + 2 * slot : 5 + 2 * slot].T
                mine = (chosen == index) & (applied < operation.probability)
                rows[mine, slot] = operation.rows(level[mine], sign[mine], side)
        return rows


@dataclass(frozen=True)
class InRandomOrder:
    """Every operation once, each with a continuous level of its own, in a random order."""

    operations: Sequence[Operation]

    @property
    def slots(self) -> int:
        """The number of operations that an image gets."""
        return len(self.operations)

    @property
    def numbers(self) -> int:
        """The number of uniforms for each image."""
        return 2 * self.slots

    def draw(self, uniforms: Floats, side: int) -> Rows:
        """Return rows (N, slots, WIDTH) of uniforms (N, numbers), for images of this height and width."""
        levels, order = np.split(uniforms, 2, 1)
        rows = [each.rows(level, level, side) for each, level in zip(self.operations, levels.T, strict=True)]
        return np.take_along_axis(np.stack(rows, 1), order.argsort(1)[..., None], 1)


@dataclass(frozen=True)
class UpTo:
    """A stage that is applied 1 to `most` times, with equal probability for each number."""

    stage: OneOf
    most: int

    @property
    def slots(self) -> int:
        """The number of operations that an image gets."""
        return self.most * self.stage.slots

    @property
    def numbers(self) -> int:
        """The number of uniforms for each image."""
        return 1 + self.most * self.stage.numbers

    def draw(self, uniforms: Floats, side: int) -> Rows:
        """Return rows (N, slots, WIDTH) of uniforms (N, numbers), for images of this height and width."""
        rows = [self.stage.draw(part, side) for part in np.split(uniforms[:, 1:], self.most, 1)]
        for index, absent in enumerate(np.floor(uniforms[:, 0] * self.most) < np.arange(self.most)[:, None]):
            rows[index][absent] = 0
        return np.concatenate(rows, 1)


Stage = OneOf | InRandomOrder | UpTo


@dataclass(frozen=True)
class Policy:
    """The stages of a policy.

    Args:
        stages: applied in turn.
        chains: 1, or the number of chains of operations that AugMix mixes with the original.
        fills_with_mean: whether warps fill the area outside of the image with the mean colour, as timm does; else it
            is black.
    """

    stages: tuple[Stage, ...] = ()
    chains: int = 1
    fills_with_mean: bool = False

    @property
    def slots(self) -> int:
        """The number of operations in a chain."""
        return sum(stage.slots for stage in self.stages)

    @property
    def numbers(self) -> int:
        """The number of uniforms for each chain of an image."""
        return sum(stage.numbers for stage in self.stages)

    def draw(self, uniforms: Floats, side: int) -> Rows:
        """Return rows (N, slots, WIDTH) of uniforms (N, numbers), for images of this height and width."""
        parts = np.split(uniforms, np.cumsum([stage.numbers for stage in self.stages])[:-1], 1)
        return np.concatenate([stage.draw(part, side) for stage, part in zip(self.stages, parts, strict=True)], 1)
