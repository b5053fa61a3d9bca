"""The operations of augmentation policies, as rows of numbers that kernels read, and the stages that choose them.

An operation of one image is a row of WIDTH float32 numbers: its `Kind`, then the parameters of that kind. The names,
the ranges and the pixels are as in `torchvision.transforms.v2`; `SolarizeAdd` is timm's.

    OPERATIONS["Rotate"](magnitudes (N,), side)  -->  rows (N, WIDTH)

`cpu.py` applies rows by torch and torchvision, `kernels.py` by Triton on a GPU. A policy is a sequence of stages, and a
stage fills one or more slots of an image with an operation each:

    uniforms (N, numbers)  --stage.draw-->  rows (N, slots, WIDTH)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.float32]

WIDTH = 8


class Kind(IntEnum):
    """What a row does to its image, and what its parameters are."""

    IDENTITY = 0
    BRIGHTNESS = 1
    """factor"""
    CONTRAST = 2
    """factor"""
    POSTERIZE = 3
    """bits that are kept, 0 to 8"""
    SOLARIZE = 4
    """threshold: values from it on are inverted"""
    SOLARIZE_ADD = 5
    """addend of values below 128"""
    AUTOCONTRAST = 6
    EQUALIZE = 7
    SATURATION = 8
    """factor"""
    HUE = 9
    """shift, as a share of the circle"""
    SHARPNESS = 10
    """factor"""
    BLUR_ROWS = 11
    """standard deviation of a Gaussian, in pixels, along the rows"""
    BLUR_COLUMNS = 12
    """standard deviation of a Gaussian, in pixels, along the columns"""
    WARP = 13
    """matrix (2, 3) from the output's to the input's coordinates x, y, in pixels from the centre"""


TABLES = range(Kind.BRIGHTNESS, Kind.EQUALIZE + 1)
"""Kinds that map each value of a channel to another one, by a table of 256 entries."""
BLUR_RADIUS = 6
"""Pixels on either side that a blur reads: 3 standard deviations of the largest one, 2."""


def rows(kind: Kind, *parameters: ArrayLike) -> Rows:
    """Return the rows of a kind with these parameters, each (N,) or the same for all."""
    columns = np.broadcast_arrays(float(kind), *parameters)
    filled = np.zeros((*columns[0].shape, WIDTH), np.float32)
    filled[..., : len(columns)] = np.stack(columns, -1)
    return filled


def _constant(kind: Kind, *parameters: float) -> Callable[[Floats, int], Rows]:
    return lambda magnitudes, side: rows(kind, *(np.full(magnitudes.shape, value) for value in (*parameters, 0.0)))


def _by_factor(kind: Kind) -> Callable[[Floats, int], Rows]:
    return lambda magnitudes, side: rows(kind, 1 + magnitudes)


def _rotate(degrees: Floats, side: int) -> Rows:
    angle = np.radians(-degrees)
    cosine, sine = np.cos(angle), np.sin(angle)
    return rows(Kind.WARP, cosine, sine, 0, -sine, cosine, 0)


OPERATIONS: dict[str, Callable[[Floats, int], Rows]] = {
    "Identity": _constant(Kind.IDENTITY),
    "ShearX": lambda shear, side: rows(Kind.WARP, 1, shear, shear * side / 2, 0, 1, 0),
    "ShearY": lambda shear, side: rows(Kind.WARP, 1, 0, 0, shear, 1, shear * side / 2),
    "TranslateX": lambda pixels, side: rows(Kind.WARP, 1, 0, -pixels, 0, 1, 0),
    "TranslateY": lambda pixels, side: rows(Kind.WARP, 1, 0, 0, 0, 1, -pixels),
    "Rotate": _rotate,
    "Brightness": _by_factor(Kind.BRIGHTNESS),
    "Color": _by_factor(Kind.SATURATION),
    "Contrast": _by_factor(Kind.CONTRAST),
    "Sharpness": _by_factor(Kind.SHARPNESS),
    "Hue": lambda shift, side: rows(Kind.HUE, shift),
    "Posterize": lambda bits, side: rows(Kind.POSTERIZE, bits),
    "Solarize": lambda share, side: rows(Kind.SOLARIZE, 255 * share),
    "SolarizeAdd": lambda addend, side: rows(Kind.SOLARIZE_ADD, addend),
    "AutoContrast": _constant(Kind.AUTOCONTRAST),
    "Equalize": _constant(Kind.EQUALIZE),
    "Invert": _constant(Kind.SOLARIZE, 0.0),
    "Grey": _constant(Kind.SATURATION, 0.0),
    "BlurX": lambda sigma, side: rows(Kind.BLUR_ROWS, sigma),
    "BlurY": lambda sigma, side: rows(Kind.BLUR_COLUMNS, sigma),
}
"""Functions that return the rows of an operation for its magnitudes (N,) and the height and width of the image.

A magnitude is: of Brightness, Color, Contrast and Sharpness the factor minus 1; of Rotate degrees; of ShearX and ShearY
the tangent; of TranslateX and TranslateY pixels; of Posterize bits; of Solarize a share of 255; of SolarizeAdd a value;
of Hue a share of the circle; of BlurX and BlurY a standard deviation in pixels.
"""

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
        columns = zip(operations, levels.T, strict=True)
        rows = [operation.rows(level, level, side) for operation, level in columns]
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
