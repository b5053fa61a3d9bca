"""The geometry of detection: how boxes (left, top, right, bottom) change when images are fitted into squares."""

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.coco import Coco
from raydali.errors import DataError

Integers = NDArray[np.int64]
Boxes = NDArray[np.float32]

PADDING = -1
"""The label of entries that pad the row of an image and are no boxes."""


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
