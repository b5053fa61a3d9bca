"""Image classification: a random resized crop and flip to train, a centre crop to validate.

Here stand the settings and the random numbers, and nothing slow to import: the driver makes these objects to have
their settings refused early. The pixels are classification_dali.py's and, for the baseline, classification_pillow.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.labeled import LabeledSource
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.data.tasks.random_crops import CROP_UNIFORMS, Range, crop_windows, draw_crops
from raydali.data.tasks.settings import (
    default_resize_size,
    require,
    require_crops,
    require_decoding,
    require_draws,
    require_resize,
)

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]
Shapes = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[LabeledSource]):
    """What training and validation images have in common.

    Args:
        image_size: height and width of what comes out, pixels.
        hw_decoder_load: share of the JPEGs that the GPU's hardware decoder knows which it gets; the rest goes to its
            other cores.
        largest_image: (height, width) for which decoding buffers are set aside at the start. A larger image is decoded
            too, but making room for it holds the GPU up.

    Raises:
        UsageError: a value out of its range.
    """

    image_files: ClassVar[int] = 1
    image_size: int
    hw_decoder_load: float = 1.0
    largest_image: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")
        require_decoding(self.hw_decoder_load, self.largest_image)

    @property
    def outputs(self) -> tuple[str, ...]:
        """images (N, image_size, image_size, 3) uint8 and labels (N,) int64."""
        return "images", "labels"


@dataclass(frozen=True, kw_only=True)
class TrainImages(Images):
    """A random resized crop and a random flip, drawn from (seed, epoch, id): torchvision's, from other numbers.

    Args:
        seed: key of the random numbers, 0 or more.
        random_area: bounds of the crop's share of the image's area.
        random_aspect: bounds of the crop's width / height.
        flip_probability: of a horizontal flip.
    """

    seed: int
    random_area: Range = (0.08, 1.0)
    random_aspect: Range = (3 / 4, 4 / 3)
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of their ranges."""
        super().__post_init__()
        require_draws(self.seed, flip_probability=self.flip_probability)
        require_crops(self.random_area, self.random_aspect)

    def inputs(self, source: LabeledSource, ids: Ids, epochs: Ids) -> Inputs:
        """Files, draws (N, 11, 2) of the crops, flips (N,), labels (N,) int64."""
        return source.files(ids), *self.draws(ids, epochs), source.labels[ids]

    def compute_crops(self, shapes: Shapes, inputs: Inputs, device: Device) -> Inputs:
        """Windows: starts and sizes (N, 2); flips; labels.

        For the CPU a flip is 0 or 1. For a GPU it is the corner (N, 2, 2) of the window where the result begins and
        that where it ends, in units of the window: resizing from right to left costs nothing.
        """
        draws, flips, labels = map(np.asarray, inputs)
        starts, sizes = crop_windows(shapes[0], draws, self.random_aspect)
        if device == "gpu":
            corners = np.zeros((len(flips), 2, 2), np.float32)
            corners[:, 0, 1], corners[:, 1, 0], corners[:, 1, 1] = flips, 1, 1 - flips
            flips = corners
        return starts.astype(np.int32), sizes.astype(np.int32), flips, labels

    def graph(self, source: LabeledSource, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Decodes the windows only, resizes with antialiasing and flips."""
        from raydali.data.tasks.classification_dali import train_graph

        return train_graph(self, *inputs, device=device)

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """The same crop and flip by Pillow and torchvision: image (3, image_size, image_size) uint8, label."""
        from raydali.data.tasks.classification_pillow import train_sample

        return train_sample(self, source, id, epoch)

    def draws(self, ids: Ids, epochs: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """What is random about the samples: draws (N, 11, 2) of `augment.draw_crops`, and flips (N,), 0 or 1."""
        numbers = uniforms(CROP_UNIFORMS + 1, self.seed, epochs, ids)
        flips = (numbers[:, -1] < self.flip_probability).astype(np.int32)
        return draw_crops(numbers[:, :-1], self.random_area, self.random_aspect), flips


@dataclass(frozen=True, kw_only=True)
class ValidationImages(Images):
    """The shorter side resized to `resize_size`, then the centre: torchvision's Resize and CenterCrop.

    Args:
        resize_size: at least image_size; None: 8/7 of it, as 256 is of 224.
    """

    resize_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of their ranges."""
        super().__post_init__()
        require_resize(self.shorter_side, self.image_size)

    @property
    def shorter_side(self) -> int:
        """What the shorter side is resized to, pixels."""
        return default_resize_size(self.image_size) if self.resize_size is None else self.resize_size

    def inputs(self, source: LabeledSource, ids: Ids, epochs: Ids) -> Inputs:
        """Files and labels (N,) int64; nothing is random."""
        return source.files(ids), source.labels[ids]

    def compute_crops(self, shapes: Shapes, inputs: Inputs, device: Device) -> Inputs:
        """For a GPU where the centre crops of the resized images lie in the originals: start and end (N, 2), in pixels,
        not rounded; then labels, which are all that the CPU needs."""
        if device == "cpu":
            return inputs
        (originals,) = shapes
        resized = self.shorter_side * originals // originals.min(1, keepdims=True)
        starts = np.rint((resized - self.image_size) / 2)
        scale = originals / resized
        return (starts * scale).astype(np.float32), ((starts + self.image_size) * scale).astype(np.float32), *inputs

    def graph(self, source: LabeledSource, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Decodes, resizes what the centre crop shows and nothing beside it."""
        from raydali.data.tasks.classification_dali import validation_graph

        return validation_graph(self, *inputs, device=device)

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """The same by Pillow and torchvision: image (3, image_size, image_size) uint8, label."""
        from raydali.data.tasks.classification_pillow import validation_sample

        return validation_sample(self, source, id)
