"""Sizes of training images that grow with the epoch (progressive resizing): `--image-size 160:192@65-76`.

    size
    192                          ______     epochs 0 to 65 train on the first size, epochs from 76 on, on the last one;
    160   ______________________/           between them it grows linearly, in steps of 32 pixels
          epoch 0              65    76

The schedule is FFCV's: github.com/libffcv/ffcv-imagenet, train_imagenet.py, `get_resolution`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydali.errors import UsageError

STEP = 32
"""Sizes between the first and the last one are multiples of it, in pixels."""
FORM = re.compile(r"(\d+):(\d+)@(\d+)-(\d+)")


@dataclass(frozen=True)
class ImageSizes:
    """The height and width of training images, in pixels, in each epoch.

    Args:
        first, last: the sizes up to epoch `begin`, and from epoch `end` on.
        begin, end: the epochs between which the size changes.

    Raises:
        UsageError: a size is below 1, or the ramp does not begin before its end.
    """

    first: int
    last: int
    begin: int = 0
    end: int = 1

    def __post_init__(self) -> None:
        if min(self.first, self.last) < 1:
            raise UsageError(f"--image-size must be at least 1, not {min(self.first, self.last)}")
        if self.begin >= self.end:
            raise UsageError(
                f"--image-size {self.first}:{self.last}@{self.begin}-{self.end} must begin before its end: "
                f"try {self.first}:{self.last}@{self.begin}-{self.begin + 1}"
            )

    @classmethod
    def parse(cls, given: int | str) -> "ImageSizes":
        """Return the sizes that `--image-size` gives: one, or FIRST:LAST@EPOCH-EPOCH.

        Raises:
            UsageError: it gives neither.
        """
        if isinstance(given, int):
            return cls(given, given)
        if (form := FORM.fullmatch(given)) is None:
            raise UsageError(
                f"--image-size {given} is neither a size such as 224, nor FIRST:LAST@EPOCH-EPOCH such as 160:192@65-76"
            )
        return cls(*map(int, form.groups()))

    def at(self, epoch: int) -> int:
        """Return the size of the epoch, counted from 0, in pixels."""
        if epoch <= self.begin:
            return self.first
        if epoch >= self.end:
            return self.last
        between = np.interp(epoch, [self.begin, self.end], [self.first, self.last])
        smallest, largest = sorted((self.first, self.last))
        return int(np.clip(np.round(between / STEP) * STEP, smallest, largest))

    def all(self, epochs: int) -> list[int]:
        """Return the different sizes of a run of so many epochs, in their order."""
        return [*dict.fromkeys(self.at(epoch) for epoch in range(epochs))]


def validation_size(settings: Mapping[str, Any]) -> int | None:
    """Return the size of a run's validation images, in pixels; None if its settings have no image size."""
    given, sizes = settings.get("val_image_size"), settings.get("image_size")
    return given or (None if sizes is None else ImageSizes.parse(sizes).last)
