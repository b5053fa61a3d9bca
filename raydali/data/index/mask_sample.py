"""Counts what some masks of a data set hold: values, classes, and signs that values were blended."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = 1 << 16


@dataclass
class MaskSample:
    """The findings about some masks.

    Attributes:
        is_whole: whether these are all masks of the data set.
        masks, jpegs: the number of masks that can be read, and of JPEG files among them.
        values: int64 (VALUES,), the number of pixels of each value.
        pixels: int64 (VALUES,), the number of pixels of each class, in the masks that can be trained on.
        borders: the number of pixels, in every fourth row, between two pixels that differ.
        between: int64 (VALUES,), how many of them have each value between both: a smooth filter makes such pixels.
    """

    is_whole: bool
    masks: int = 0
    jpegs: int = 0
    values: NDArray[np.int64] = field(default_factory=lambda: np.zeros(VALUES, np.int64))
    pixels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(VALUES, np.int64))
    borders: int = 0
    between: NDArray[np.int64] = field(default_factory=lambda: np.zeros(VALUES, np.int64))

    def add(self, values: NDArray[Any], is_jpeg: bool, lookup: NDArray[np.uint8], unknown: int) -> None:
        """Add the values (height, width) of a mask; `unknown` is the class in the lookup that prevents training."""
        left, here, right = (values[::4, begin : begin - 2 or None] for begin in range(3))
        between = here[(here > np.minimum(left, right)) & (here < np.maximum(left, right))]
        counts = np.bincount(values.ravel(), minlength=VALUES)
        of_classes = np.bincount(lookup, counts, VALUES).astype(np.int64)
        self.masks += 1
        self.jpegs += is_jpeg
        self.values += counts
        self.pixels += of_classes * (not of_classes[unknown])
        self.borders += int((left != right).sum())
        self.between += np.bincount(between, minlength=VALUES)
