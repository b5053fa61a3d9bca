"""The stages of an augmentation policy: which operations an image gets, in which order and how strongly.

A policy is a sequence of stages, and a stage fills one or more slots of an image with an operation each:

    uniforms (N, numbers)  --stage.draw-->  rows (N, slots, WIDTH), see operations.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Stage(NamedTuple):
    """A stage.

    Attributes:
        slots: the number of operations that an image gets.
        numbers: the number of uniforms for each image.
        draw: returns rows (N, slots, WIDTH) of uniforms (N, numbers), for images of this height and width.
    """

    slots: int
    numbers: int
    draw: Callable[[Floats, int], Rows]


def in_bins(first: Floats, second: Floats) -> Floats:
    """Return levels that are one of BINS, with equal probability."""
    return np.floor(first * BINS) / (BINS - 1)


def continuous(first: Floats, second: Floats) -> Floats:
    """Return levels that are uniform in 0..1."""
    return first


def one_of(
    lists: Sequence[Sequence[Operation]],
    level: Callable[[Floats, Floats], Floats] = in_bins,
    probability: float = 1.0,
) -> Stage:
    """Return a stage of one of several lists of operations, which fill as many slots.

    Args:
        lists: the lists, each with equal probability.
        level: the level of all operations of an image, from two uniforms (N,).
        probability: of applying any list.
    """
    slots = max(map(len, lists))

    def draw(uniforms: Floats, side: int) -> Rows:
        chosen, levels = np.floor(uniforms[:, 0] / probability * len(lists)), level(*uniforms[:, 1:3].T)
        rows = np.zeros((len(uniforms), slots, WIDTH), np.float32)
        for index, operations in enumerate(lists):
            for slot, operation in enumerate(operations):
                sign, applied = uniforms[:, 3 + 2 * slot : 5 + 2 * slot].T
                mine = (chosen == index) & (applied < operation.probability)
                rows[mine, slot] = operation.rows(levels[mine], sign[mine], side)
        return rows

    return Stage(slots, 3 + 2 * slots, draw)


def in_random_order(operations: Sequence[Operation]) -> Stage:
    """Return a stage of every operation once, each with a continuous level of its own, in a random order."""

    def draw(uniforms: Floats, side: int) -> Rows:
        levels, order = np.split(uniforms, 2, 1)
        rows = [each.rows(level, level, side) for each, level in zip(operations, levels.T, strict=True)]
        return np.take_along_axis(np.stack(rows, 1), order.argsort(1)[..., None], 1)

    return Stage(len(operations), 2 * len(operations), draw)


def up_to(most: int, stage: Stage) -> Stage:
    """Return a stage that is applied 1 to `most` times, with equal probability for each number."""

    def draw(uniforms: Floats, side: int) -> Rows:
        rows = [stage.draw(part, side) for part in np.split(uniforms[:, 1:], most, 1)]
        for index, absent in enumerate(np.floor(uniforms[:, 0] * most) < np.arange(most)[:, None]):
            rows[index][absent] = 0
        return np.concatenate(rows, 1)

    return Stage(most * stage.slots, 1 + most * stage.numbers, draw)


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
