"""The operations of augmentation policies, and their parameters as rows of numbers that kernels read.

An operation of one image is a row of WIDTH float32 numbers: its `Kind`, then the parameters of that kind. The names,
the ranges and the pixels are those of `torchvision.transforms.v2`; `SolarizeAdd` is timm's.

    OPERATIONS["Rotate"](magnitudes (N,), side)  -->  rows (N, WIDTH)

`cpu.py` applies rows by torch and torchvision, `kernels.py` by Triton on a GPU.
"""

from collections.abc import Callable
from enum import IntEnum

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
    return lambda magnitudes, side: rows(kind, *(np.full(magnitudes.shape, each) for each in (*parameters, 0.0)))


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
