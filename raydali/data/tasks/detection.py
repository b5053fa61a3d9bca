"""Object detection: a random crop and flip of images and boxes for training, the whole image for validation.

    image --> window --> fitted into a square with its aspect kept and the rest filled with grey --> flipped
    boxes --> those whose centre is in the window, clipped to its border --> the same

`graph` transforms images in DALI, `sample` with Pillow for the baseline loader, and `moved` the boxes. On the CPU
pixels differ from Pillow's by rounding, at most 2 of 255; on a GPU the outermost pixels of images that are scaled down
also differ (see classification.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.coco import Coco
from raydali.data.index.source import Readable
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import CROP_UNIFORMS, RandomCrops, Range, resize
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples, refuse
from raydali.data.tasks.settings import DecoderSettings, SquareImages, require, require_share
from raydali.errors import DataError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode
    from PIL import Image

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Boxes = NDArray[np.float32]
"""Left, top, right and bottom of each box, in pixels."""

PADDING = -1
"""The label of entries that pad the row of an image and are no boxes."""

FILL = 124, 116, 104
"""The colour around an image in its square: the mean of ImageNet, which is 0 after normalisation."""


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[Coco], DecoderSettings, SquareImages):
    """The settings that training and validation images share; see `DecoderSettings` and `SquareImages`."""

    image_files: ClassVar[int] = 1

    def graph(self, source: Coco, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode only the windows, fit them into the square with antialiasing, and flip them."""
        from nvidia.dali import fn

        from raydali.data.tasks import dali_ops

        encoded, starts, sizes, flips, *others = inputs
        images = fn.decoders.image_slice(
            encoded, start=starts, shape=sizes, axes=[0, 1], **self.decoder_options(device)
        )
        if device == "cpu":
            images = dali_ops.each_image(partial(_resized_into_square, side=self.image_size), images)
            return fn.flip(images, horizontal=flips), *others
        small, square, *others = others
        images = fn.resize(images, size=small)
        shape = self.image_size, self.image_size
        images = fn.slice(images, square, shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=FILL)
        return fn.flip(images, horizontal=flips), *(other.gpu() for other in others)

    def files(self, source: Coco) -> Sequence[Readable]:
        """Return the images."""
        return (source,)

    def sizes(self, source: Coco, samples: Samples) -> Integers:
        """Return the heights and widths (N, 2) of images, which are those of their annotations.

        Raises:
            SampleErrors: an image has another size, so that its boxes are invalid.
        """
        (shapes,), annotated = samples.shapes, source.sizes[samples.ids]

        def differs(place: int) -> DataError:
            (height, width), (known_height, known_width) = shapes[place].tolist(), annotated[place].tolist()
            return DataError(
                f"{width}x{height} pixels after rotation, but {known_width}x{known_height} in the annotations: correct "
                "the annotations or the image"
            )

        refuse((annotated != shapes).any(1) & (annotated != 0).all(1), differs)  # 0: nothing is annotated
        return shapes

    def windows(self, starts: Integers, sizes: Integers, flips: NDArray[np.int32], device: Device) -> Inputs:
        """Return the graph's inputs for N windows: starts and sizes (N, 2), flips (N,).

        For GPUs also return the fitted sizes, and the start of the square in them, (N, 2) each.
        """
        placed = starts.astype(np.int32), sizes.astype(np.int32), flips
        if device == "cpu":
            return placed
        small = fitted(sizes, self.image_size)
        return *placed, small.astype(np.float32), (-corners(small, self.image_size)).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class TrainImages(RandomCrops, Images):
    """A random crop and a random horizontal flip, which depend on (seed, epoch, id) only; see also `RandomCrops`.

    The window is drawn as in classification. A box is kept if its centre is in the window, as in SSD (Liu et al., ECCV
    2016), and clipped to the window's border. Crowds are omitted.

    Args:
        max_boxes: number of boxes in each row of the output; no image may have more. None: the source's `most_boxes`.
        crop_probability: probability of a crop; otherwise the window is the whole image.
    """

    max_boxes: int | None = None
    crop_probability: float = 0.5
    random_area: Range = (0.3, 1.0)
    random_aspect: Range = (1 / 2, 2.0)

    def __post_init__(self) -> None:
        """Check that values are in their ranges."""
        super().__post_init__()
        require(self.max_boxes is None or self.max_boxes >= 1, f"max_boxes must be at least 1, not {self.max_boxes}")
        require_share(crop_probability=self.crop_probability)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images, boxes and labels.

        Images are (N, image_size, image_size, 3) uint8. Boxes are (N, max_boxes, 4) float32: left, top, right,
        bottom, in pixels. Labels are (N, max_boxes) int64, PADDING after the last box.
        """
        return "images", "boxes", "labels"

    def row_of(self, source: Coco) -> int:
        """Return the number of boxes in each row of the output."""
        return self.max_boxes or max(1, source.most_boxes)

    def inputs(self, source: Coco, samples: Samples) -> Inputs:
        """Return the result of `windows`; boxes (N, max_boxes, 4) float32 and labels (N, max_boxes) in the windows.

        Raises:
            SampleErrors: an image's size is not the annotated one.
            DataError: an image has more than `max_boxes` boxes.
        """
        draws, crops, flips = self.draws(samples.ids, samples.keys)
        starts, sizes = self.chosen(self.sizes(source, samples), draws, crops)
        boxes, labels = padded(source, samples.ids, self.row_of(source))
        shown = moved(boxes, labels, starts, sizes, flips, self.image_size)
        return *self.windows(starts, sizes, flips, samples.device), *shown

    def sample(self, source: Coco, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return by Pillow: image (3, image_size, image_size) uint8, boxes (max_boxes, 4), labels (max_boxes,).

        Raises:
            SampleErrors, DataError: see `inputs`.
        """
        import torch
        from torchvision.transforms.v2 import functional as F

        from raydali.data.decode.pillow import decoded

        image = decoded(source.read(id))
        (start,), (size,), (flip,), (boxes,), (labels,) = self.inputs(
            source, Samples.one(id, epoch, (image.height, image.width))
        )
        (top, left), (height, width) = start.tolist(), size.tolist()
        square = _pasted_into_square(image.crop((left, top, left + width, top + height)), self.image_size)
        pixels = F.pil_to_tensor(F.horizontal_flip(square) if flip else square)
        return pixels, torch.from_numpy(boxes), torch.from_numpy(labels)

    def draws(self, ids: Integers, keys: Integers) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int32]]:
        """Draw the random numbers of samples.

        Returns:
            The random numbers of `draw_crops` (N, 11, 2); whether to crop (N,); flips (N,), 0 or 1.
        """
        numbers = uniforms(CROP_UNIFORMS + 2, self.seed, keys, ids)
        cropped = numbers[:, -2] < self.crop_probability
        return self.draw_crops(numbers[:, :-2]), cropped, self.flips(numbers[:, -1])

    def chosen(self, shapes: Integers, draws: Floats, crops: NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """Return starts and sizes (N, 2) of the windows for these random numbers in images of these shapes."""
        starts, sizes = self.crop_windows(shapes, draws)
        return np.where(crops[:, None], starts, 0), np.where(crops[:, None], sizes, shapes)


@dataclass(frozen=True, kw_only=True)
class ValidationImages(Images):
    """The whole image, without boxes: detections are compared in pixels of the original, see `unfitted`."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, image_size, image_size, 3) uint8, and of the originals' sizes (N, 2) int64."""
        return "images", "sizes"

    def inputs(self, source: Coco, samples: Samples) -> Inputs:
        """Return the result of `windows` for whole images, and their sizes (N, 2) int64.

        Raises:
            SampleErrors: an image's size is not the annotated one.
        """
        sizes, flips = self.sizes(source, samples), np.zeros(len(samples.ids), np.int32)
        return *self.windows(np.zeros_like(sizes), sizes, flips, samples.device), sizes

    def sample(self, source: Coco, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same, made by Pillow: image (3, image_size, image_size) uint8, size (2,).

        Raises:
            SampleErrors: the image's size is not the annotated one.
        """
        import torch
        from torchvision.transforms import functional as F

        from raydali.data.decode.pillow import decoded

        image = decoded(source.read(id))
        (size,) = self.sizes(source, Samples.one(id, epoch, (image.height, image.width)))
        return F.pil_to_tensor(_pasted_into_square(image, self.image_size)), torch.from_numpy(size)


def _resized_into_square(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return an image (H, W, 3) in the middle of a square (side, side, 3)."""
    small = fitted(np.array(image.shape[:2]), side)
    (height, width), (top, left) = small.tolist(), corners(small, side).tolist()
    square = np.full((side, side, 3), FILL, np.uint8)
    square[top : top + height, left : left + width] = resize(image, (height, width))
    return square


def _pasted_into_square(image: "Image.Image", side: int) -> "Image.Image":
    """Return the image in the middle of a square, resized by Pillow."""
    from PIL import Image
    from torchvision.transforms import functional as F

    small = fitted(np.array([image.height, image.width]), side)
    top, left = corners(small, side).tolist()
    square = Image.new("RGB", (side, side), FILL)
    square.paste(F.resize(image, small.tolist()), (left, top))
    return square


def padded(source: Coco, ids: Integers, max_boxes: int) -> tuple[Boxes, Integers]:
    """Return boxes (N, max_boxes, 4) and labels (N, max_boxes). The label is PADDING for crowds and after the last box.

    Raises:
        DataError: an image has more than `max_boxes` boxes.
    """
    begins = source.first_boxes[ids]
    counts = source.first_boxes[ids + 1] - begins
    if counts.max() > max_boxes:
        id = int(ids[counts.argmax()])
        raise DataError(
            f"{source.path(id)} has {counts.max()} boxes, more than max_boxes, {max_boxes}: "
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
    """Return boxes (N, M, 4) and labels (N, M) in the squares that show windows; hidden boxes get the label PADDING.

    Args:
        boxes: (N, M, 4), in pixels of the originals.
        labels: (N, M).
        starts: first row and column of each window, (N, 2).
        sizes: height and width of each window, (N, 2).
        flips: (N,), 0 or 1.
        side: side of the squares, in pixels.
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
    """Scale heights and widths (N, 2), in either order, so that the longer one is `side`."""
    scaled = np.rint(sizes * (side / sizes.max(-1, keepdims=True)))
    whole: Integers = scaled.clip(1, side).astype(np.int64)
    return whole


def corners(fitted: Integers, side: int) -> Integers:
    """Return the first row and column of a fitted image that is centred in a square."""
    return (side - fitted) // 2


def unfitted(boxes: Boxes, size: Integers, side: int) -> Boxes:
    """Convert boxes (K, 4) from a square back to the original image, clipped to its border.

    Args:
        boxes: (K, 4), in pixels of the square.
        size: height and width (2,) of the original, in pixels.
        side: side of the square, in pixels.
    """
    small = fitted(size, side)
    scale, corner = size / small, corners(small, side)
    in_original = (boxes - np.tile(corner[::-1], 2)) * np.tile(scale[::-1], 2)
    return in_original.clip(0, np.tile(size[::-1], 2)).astype(np.float32)
