"""Object detection: a random crop and flip to train, boxes moved along; the whole image to validate.

    image --> window --> fitted into a square, its aspect kept, the rest filled with grey --> flipped
    boxes --> those whose centre the window shows, cut off at its border --> the same

Here stand the settings, the random numbers and the geometry, and nothing slow to import: the driver makes these
objects to have their settings refused early. The pixels are detection_dali.py's and, for the baseline,
detection_pillow.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.coco import Coco
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.data.tasks.random_crops import CROP_UNIFORMS, Range, crop_windows, draw_crops
from raydali.data.tasks.settings import require, require_crops, require_decoding, require_draws
from raydali.errors import DataError

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Boxes = NDArray[np.float32]

FILL = 124, 116, 104
"""The grey around an image in its square: the mean of ImageNet, which normalised is 0."""
PADDING = -1
"""The label of what is no box, but fills up an image's row."""


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[Coco]):
    """What training and validation images have in common.

    Args:
        image_size: height and width of what comes out, pixels.
        hw_decoder_load, largest_image: as `classification.Images` takes them.

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

    def graph(self, source: Coco, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Decodes the windows only, fits them into the square with antialiasing, and flips."""
        from raydali.data.tasks.detection_dali import detection_graph

        return detection_graph(self, *inputs, device=device)

    def unfit(self, shapes: Sequence[Integers], inputs: Inputs) -> NDArray[np.bool_]:
        """Images (N,) of another size than annotated."""
        return differs(np.asarray(inputs[0]), shapes[0])

    def windows(
        self, starts: Integers, sizes: Integers, flips: NDArray[np.int32], refused: NDArray[np.bool_], device: Device
    ) -> Inputs:
        """What the graph needs of N windows: starts and sizes (N, 2), flips (N,); on GPUs also the fitted sizes and
        where the square begins in them, (N, 2) each.

        Args:
            refused: (N,), which windows are to reach out of their images: decoders refuse them, `sample` says why.
        """
        placed = np.where(refused[:, None], -1, starts).astype(np.int32), sizes.astype(np.int32), flips
        if device == "cpu":
            return placed
        small = fitted(sizes, self.image_size)
        return *placed, small.astype(np.float32), (-corners(small, self.image_size)).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class TrainImages(Images):
    """A random crop and a random flip, drawn from (seed, epoch, id).

    The window is that of classification (random_crops.py). A box is kept where its centre lies in the window, as in SSD
    (Liu et al., ECCV 2016), and cut off at the window's border. Crowds are left out.

    Args:
        max_boxes: boxes in a row of the output; no image may have more: give the source's `most_boxes`.
        seed: key of the random numbers, 0 or more.
        crop_probability: how often a window is cut out, instead of the whole image taken.
        random_area: bounds of the window's share of the image's area.
        random_aspect: bounds of the window's width / height.
        flip_probability: of a horizontal flip.
    """

    max_boxes: int
    seed: int
    crop_probability: float = 0.5
    random_area: Range = (0.3, 1.0)
    random_aspect: Range = (1 / 2, 2.0)
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of their ranges."""
        super().__post_init__()
        require(self.max_boxes >= 1, f"max_boxes must be at least 1, not {self.max_boxes}")
        require_draws(self.seed, crop_probability=self.crop_probability, flip_probability=self.flip_probability)
        require_crops(self.random_area, self.random_aspect)

    @property
    def outputs(self) -> tuple[str, ...]:
        """images (N, image_size, image_size, 3) uint8; boxes (N, max_boxes, 4) float32, left, top, right, bottom in
        its pixels; labels (N, max_boxes) int64, PADDING behind the last box."""
        return "images", "boxes", "labels"

    def inputs(self, source: Coco, ids: Integers, epochs: Integers) -> Inputs:
        """Files; annotated sizes (N, 2); draws (N, 11, 2) of the crops; crops and flips (N,); boxes, labels.

        Raises:
            DataError: an image has more than `max_boxes` boxes.
        """
        return source.files(ids), source.sizes[ids], *self.draws(ids, epochs), *padded(source, ids, self.max_boxes)

    def compute_crops(self, shapes: Sequence[Integers], inputs: Inputs, device: Device) -> Inputs:
        """What `windows` makes; boxes (N, max_boxes, 4) float32 and labels (N, max_boxes), in the windows."""
        annotated, draws, crops, flips, boxes, labels = map(np.asarray, inputs)
        starts, sizes = self.chosen(shapes[0], draws, crops)
        placed = self.windows(starts, sizes, flips, differs(annotated, shapes[0]), device)
        return *placed, *moved(boxes, labels, starts, sizes, flips, self.image_size)

    def sample(self, source: Coco, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """The same by Pillow: image (3, image_size, image_size) uint8, boxes (max_boxes, 4), labels (max_boxes,).

        Raises:
            DataError: the image's size is not the annotated one; more than `max_boxes` boxes.
        """
        from raydali.data.tasks.detection_pillow import train_sample

        return train_sample(self, source, id, epoch)

    def draws(self, ids: Integers, epochs: Integers) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int32]]:
        """What is random about the samples: draws (N, 11, 2) of `augment.draw_crops`; whether to crop (N,); flips (N,),
        0 or 1."""
        numbers = uniforms(CROP_UNIFORMS + 2, self.seed, epochs, ids)
        crops = numbers[:, -2] < self.crop_probability
        flips = (numbers[:, -1] < self.flip_probability).astype(np.int32)
        return draw_crops(numbers[:, :-2], self.random_area, self.random_aspect), crops, flips

    def chosen(self, shapes: Integers, draws: Floats, crops: NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """The windows, starts and sizes (N, 2), that `draws` gives in images of these shapes."""
        starts, sizes = crop_windows(shapes, draws, self.random_aspect)
        return np.where(crops[:, None], starts, 0), np.where(crops[:, None], sizes, shapes)


@dataclass(frozen=True, kw_only=True)
class ValidationImages(Images):
    """The whole image. Boxes are not its matter: what was found is taken back to the original's pixels, `unfitted`."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """images (N, image_size, image_size, 3) uint8; sizes (N, 2) int64, the originals' height and width."""
        return "images", "sizes"

    def inputs(self, source: Coco, ids: Integers, epochs: Integers) -> Inputs:
        """Files and annotated sizes (N, 2)."""
        return source.files(ids), source.sizes[ids]

    def compute_crops(self, shapes: Sequence[Integers], inputs: Inputs, device: Device) -> Inputs:
        """What `windows` makes of whole images, and their sizes (N, 2) int64."""
        (sizes,), (annotated,) = shapes, map(np.asarray, inputs)
        flips = np.zeros(len(sizes), np.int32)
        refused = differs(annotated, sizes)
        return *self.windows(np.zeros_like(sizes), sizes, flips, refused, device), np.ascontiguousarray(sizes)

    def sample(self, source: Coco, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """The same by Pillow: image (3, image_size, image_size) uint8, size (2,).

        Raises:
            DataError: the image's size is not the annotated one.
        """
        from raydali.data.tasks.detection_pillow import validation_sample

        return validation_sample(self, source, id)


def padded(source: Coco, ids: Integers, max_boxes: int) -> tuple[Boxes, Integers]:
    """Boxes (N, max_boxes, 4) and labels (N, max_boxes) of these images, PADDING for crowds and behind the last box.

    Raises:
        DataError: an image has more boxes.
    """
    begins = source.first_boxes[ids]
    counts = source.first_boxes[ids + 1] - begins
    if counts.max() > max_boxes:
        id = int(ids[counts.argmax()])
        raise DataError(
            f"{source.path(id)} has {counts.max()} boxes, more than the {max_boxes} of max_boxes: "
            f"raise it to {source.most_boxes}"
        )
    columns = np.arange(max_boxes)
    filled = columns < counts[:, None]
    boxes, labels = np.zeros((len(ids), max_boxes, 4), np.float32), np.full((len(ids), max_boxes), PADDING)
    places = (begins[:, None] + columns)[filled]
    boxes[filled] = source.boxes[places]
    labels[filled] = np.where(source.crowd[places], PADDING, source.labels[places])
    return boxes, labels


def moved(
    boxes: Boxes, labels: Integers, starts: Integers, sizes: Integers, flips: NDArray[np.int32], side: int
) -> tuple[Boxes, Integers]:
    """Boxes (N, M, 4) and labels (N, M) as the windows show them in squares; what they do not show is PADDING.

    Args:
        boxes, labels: (N, M, 4) and (N, M), in pixels of the originals.
        starts, sizes: of the windows, (N, 2), height before width.
        flips: (N,), 0 or 1.
        side: of the squares, pixels.
    """
    high, small = sizes[:, None, ::-1], fitted(sizes, side)[:, None, ::-1]  # width before height
    begins, ends = np.split(boxes.astype(np.float64) - np.tile(starts[:, None, ::-1], 2), 2, 2)
    centres = (begins + ends) / 2
    shown = ((centres >= 0) & (centres < high)).all(2) & (labels != PADDING)
    scale, corner = small / high, corners(small, side)
    begins, ends = (points.clip(0, high) * scale + corner for points in (begins, ends))
    mirrored = flips[:, None] == 1
    left, right = begins[..., 0], ends[..., 0]
    begins[..., 0], ends[..., 0] = np.where(mirrored, side - right, left), np.where(mirrored, side - left, right)
    placed = np.concatenate([begins, ends], 2).astype(np.float32)
    shown &= (placed[..., 2:] > placed[..., :2]).all(2)
    order = np.argsort(~shown, 1, kind="stable")
    shown = np.take_along_axis(shown, order, 1)
    placed = np.where(shown[..., None], np.take_along_axis(placed, order[..., None], 1), np.float32(0))
    return placed, np.where(shown, np.take_along_axis(labels, order, 1), PADDING)


def fitted(sizes: Integers, side: int) -> Integers:
    """Height and width (N, 2), or width and height, scaled so that the longer one is `side`."""
    scaled = np.rint(sizes * (side / sizes.max(-1, keepdims=True)))
    whole: Integers = scaled.clip(1, side).astype(np.int64)
    return whole


def corners(fitted: Integers, side: int) -> Integers:
    """Where, in a square, what was fitted into its middle begins."""
    return (side - fitted) // 2


def unfitted(boxes: Boxes, size: Integers, side: int) -> Boxes:
    """Boxes (K, 4) in a square as boxes in the original, cut off at its border.

    Args:
        size: height and width (2,) of the original, pixels.
        side: of the square, pixels.
    """
    small = fitted(size, side)
    scale, corner = size / small, corners(small, side)
    in_original = (boxes - np.tile(corner[::-1], 2)) * np.tile(scale[::-1], 2)
    return in_original.clip(0, np.tile(size[::-1], 2)).astype(np.float32)


def differs(annotated: Integers, shapes: Integers) -> NDArray[np.bool_]:
    """Which images (N,) have another size than the annotated one, so that boxes would lie anywhere."""
    other: NDArray[np.bool_] = (annotated != shapes).any(1) & (annotated != 0).all(1)
    return other
