"""Images with boxes from COCO's annotations, for detectors.

The format, https://cocodataset.org/#format-data, has `images`, `annotations`, of which the boxes are read, and
`categories` in one JSON file, such as instances_train2017.json.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raydali.data.index.files import Files, absolute, digest
from raydali.data.index.listing import list_tree
from raydali.data.read import storage
from raydali.data.read.storage import why_pointer
from raydali.errors import UsageError
from raydali.text import numbered, plural, summarize

_log = logging.getLogger(__name__)

Items = Sequence[Mapping[str, Any]]
_OF_64_BITS = range(-1 << 63, 1 << 63)
_MANY = 0.25
"""The share of boxes that reach past their images from which they may be corners."""
_CROWDS = {0: False, 1: True, None: False, "0": False, "1": True, "": False}


@dataclass(frozen=True, eq=False)
class Coco(Files):
    """N images by id 0..N-1, in the order of the annotations, and B boxes. Made by `from_file` and `yolo_split`.

    Attributes:
        sizes: int64 (N, 2), height and width in pixels from the annotations or the images; (0, 0) if unknown.
        image_ids: int64 (N,), the ids in the annotations.
        first_boxes: int64 (N + 1,), where each image's boxes begin, and their end.
        boxes: float32 (B, 4), left, top, right, bottom in pixels of the upright image; none is empty.
        labels: int64 (B,), in 1..C: 0 is the background in torchvision's detectors.
        crowd: bool (B,), whether a box surrounds many objects that are not annotated one by one: it is not trained
            on, and detections in it count neither as right nor as wrong.
        classes: names of the C categories in order of their ids; label i is classes[i - 1].
        category_ids: int64 (C,), the ids in the annotations.
    """

    sizes: NDArray[np.int64]
    image_ids: NDArray[np.int64]
    first_boxes: NDArray[np.int64]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    classes: tuple[str, ...]
    category_ids: NDArray[np.int64]

    @classmethod
    def from_file(cls, annotations: str, root: str) -> Self:
        """Index the images and boxes of a JSON file. Images without boxes stay; those without a file are `missing`.

        Of a path of another machine, such as /data/upload/1/x.jpg, the last parts count that are below the root, with a
        warning. The root category of Roboflow, which has no boxes, is no class.

        Warns of boxes without height or width, and leaves them out: no detector of torchvision accepts them. Warns of
        boxes outside of their image. Ids are whole numbers, also as 12.0 or "12"; an annotation's may be any text.

        Args:
            annotations: the file; local (`~` is expanded), or an `s3://` or `gs://` URI.
            root: the folder of the images, see `files.absolute`.

        Raises:
            UsageError: the file cannot be read or has another format; an annotation whose image or category is missing,
                or whose box is not four numbers; boxes that are corners, or fractions of the image; duplicate ids,
                names of categories, or files; no image exists below the root.
        """
        path = absolute(annotations)
        images, annotated, categories = _read(path)
        image_ids = _ids(path, "image", images)
        named = enumerate(annotated, 1)  # only messages need ids of annotations
        annotated = [{**one, "id": f"number {i}"} if one.get("id") is None else one for i, one in named]
        categories = _without_root(categories, annotated)
        category_ids = _ids(path, "category", categories)
        _require_different(path, "annotation", (str(one["id"]) for one in annotated))
        names, missing = _located(path, absolute(root), _column(path, "image", images, "file_name", str))
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            same = [id for id, other in zip(image_ids.tolist(), names, strict=True) if other == name]
            raise UsageError(f"{path}: images {summarize(same)} are one file, {name!r}: make them one entry")

        order = np.argsort(category_ids)
        labels = _found(path, annotated, "category", category_ids[order]) + 1
        owners = _found(path, annotated, "image", image_ids)
        boxes = _boxes(path, annotated)
        sizes = np.array([_size(image) for image in images], np.int64)
        _check_boxes(path, annotated, boxes, sizes[owners, ::-1])
        crowd = np.array([_is_crowd(path, one) for one in annotated], bool)

        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        if not kept.all():
            left_out = [annotated[i].get("id") for i in np.flatnonzero(~kept).tolist()]
            _log.warning("%s: left out boxes without width or height, of %s", path, numbered("annotation", left_out))
        by_image = np.flatnonzero(kept)[np.argsort(owners[kept], kind="stable")]
        counts = np.bincount(owners[kept], minlength=len(images))
        names_of_classes = _column(path, "category", categories, "name", str)
        name, count = Counter(names_of_classes).most_common(1)[0]
        if count > 1:
            same = [id for id, other in zip(category_ids.tolist(), names_of_classes, strict=True) if other == name]
            raise UsageError(f"{path}: categories {summarize(same)} have one name, {name!r}: rename all but one")
        return cls.from_list(
            root,
            names,
            sizes=sizes,
            image_ids=image_ids,
            first_boxes=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            boxes=boxes[by_image],
            labels=labels[by_image],
            crowd=crowd[by_image],
            classes=tuple(names_of_classes[i] for i in order),
            category_ids=category_ids[order],
            missing=missing,
        )

    def _only(self, kept: NDArray[np.int64]) -> dict[str, Any]:
        counts = np.diff(self.first_boxes)
        boxes = np.isin(np.repeat(np.arange(len(counts)), counts), kept)
        return super()._only(kept) | {
            "sizes": self.sizes[kept],
            "image_ids": self.image_ids[kept],
            "first_boxes": np.concatenate([[0], np.cumsum(counts[kept])]),
            "boxes": self.boxes[boxes],
            "labels": self.labels[boxes],
            "crowd": self.crowd[boxes],
        }

    def boxes_of(self, id: int) -> slice:
        """The slice of an image's boxes in `boxes`, `labels` and `crowd`."""
        return slice(int(self.first_boxes[id]), int(self.first_boxes[id + 1]))

    first_label: ClassVar[int] = 1  # 0 is the background

    @cached_property
    def most_boxes(self) -> int:
        """The largest number of boxes of one image."""
        return int(np.diff(self.first_boxes).max())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of relative paths, boxes and classes, 32 hex digits; without the root, so that the data may move."""
        numbers = self.image_ids, self.first_boxes, self.boxes, self.labels, self.crowd, self.category_ids
        classes = os.fsencode("\0".join(self.classes))
        return digest(self.packed_paths.data, classes, *(array.tobytes() for array in numbers))


def _read(path: str) -> tuple[Items, Items, Items]:
    """Return images, annotations and categories."""
    remedy = "give annotations as COCO's instances_train2017.json"
    try:
        data = storage.read(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    try:
        content = json.loads(data)
    except ValueError as error:
        pointer = why_pointer(data)
        raise UsageError(f"{path}: {pointer}" if pointer else f"{path} is not JSON ({error}): {remedy}") from error
    parts = []
    for key in ("images", "annotations", "categories"):
        items = content.get(key) if isinstance(content, dict) else None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise UsageError(f'{path} has no list of "{key}": {remedy}')
        if not items and key != "annotations":
            raise UsageError(f'{path} has an empty list of "{key}": {remedy}')
        parts.append(items)
    return parts[0], parts[1], parts[2]


def _without_root(categories: Items, annotated: Items) -> Items:
    """Return the categories without the one that Roboflow puts above all others."""
    roots = [one for one in categories if one.get("supercategory") == "none"]
    others = [one for one in categories if one.get("supercategory") != "none"]
    if len(roots) != 1 or not others or any(one.get("supercategory") != roots[0].get("name") for one in others):
        return categories
    used = any(_number(one.get("category_id")) == _number(roots[0].get("id")) for one in annotated)
    return categories if used else others


def _column(path: str, kind: str, items: Items, key: str, type_: type) -> list[Any]:
    values = [item.get(key) for item in items]
    for place, value in enumerate(values):
        if type_ is int and type(value) is not int:
            value = values[place] = _number(value)
        if type(value) is not type_ or (type_ is int and value not in _OF_64_BITS):
            wanted = {int: "a whole number of 64 bits, such as 1, 2, 3", str: "a text"}[type_]
            item = items[place]
            shown = repr(value) if key in item else "missing"
            raise UsageError(f'{path}: "{key}" of {kind} {item.get("id")} must be {wanted}, not {shown}')
    return values


def _number(value: Any) -> Any:  # noqa: ANN401 (of JSON)
    """The whole number that a value such as 12.0 or "12" stands for; others as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and re.fullmatch(r"0|-?[1-9]\d*", value, re.ASCII) else value


def _ids(path: str, kind: str, items: Items) -> NDArray[np.int64]:
    ids = _column(path, kind, items, "id", int)
    _require_different(path, kind, ids)
    return np.array(ids, np.int64)


def _require_different(path: str, kind: str, ids: Iterable[object]) -> None:
    id, count = next(iter(Counter(ids).most_common(1)), (None, 0))
    if count > 1:
        raise UsageError(f"{path}: {kind} {id} occurs twice: give each its own id")


def _found(path: str, annotated: Items, kind: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of the ids that annotations refer to."""
    index = {id: i for i, id in enumerate(ids.tolist())}
    named = _column(path, "annotation", annotated, f"{kind}_id", int)
    unknown = [i for i, id in enumerate(named) if id not in index]
    if unknown:
        raise UsageError(
            f"{path}: annotation {annotated[unknown[0]].get('id')} is of {kind} {named[unknown[0]]}, which is not "
            f"listed ({plural(len(unknown), 'case')}): add the {kind}, or remove the annotation"
        )
    return np.array([index[id] for id in named], np.int64)


def _boxes(path: str, annotated: Items) -> NDArray[np.float32]:
    """Return left, top, right, bottom, (B, 4)."""
    values = [one.get("bbox") for one in annotated]
    boxes = _numbers(values) if values else np.zeros((0, 4))
    if boxes is None or boxes.shape != (len(values), 4):
        i = next(i for i, box in enumerate(values) if (one := _numbers(box)) is None or one.shape != (4,))
        raise UsageError(
            f'{path}: "bbox" of annotation {annotated[i].get("id")} must be four numbers x, y, width, height, not '
            f"{values[i]!r}"
        )
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1).astype(np.float32)


def _check_boxes(path: str, annotated: Items, boxes: NDArray[np.float32], sizes: NDArray[np.int64]) -> None:
    """Refuse boxes (B, 4) of another form than x, y, width, height in pixels; warn of those outside of their image.

    Sizes, (B, 2), are width and height of the image of each box, and 0 if they are not known.
    """

    def shown(chosen: ArrayLike) -> str:
        place = int(np.argmax(chosen))
        image = " in an image of {}x{} pixels".format(*sizes[place].tolist()) if sizes[place].all() else ""
        return f'"bbox" {annotated[place]["bbox"]} of annotation {annotated[place].get("id")}{image}'

    begin, end, extent = boxes[:, :2], boxes[:, 2:], boxes[:, 2:] - boxes[:, :2]
    sized = (sizes > 0).all(1)
    past = sized & (end > sizes + 1).any(1)
    form = ""
    if len(boxes) and (begin >= 0).all() and (np.maximum(begin, extent) <= 1).all() and (boxes % 1).any():
        form = f"{shown(boxes.any(1))} and all others are fractions of 1"
    elif past.sum() > _MANY * sized.sum() and ((extent >= begin) & (extent <= sizes + 1))[sized].all():
        form = f"{shown(past)} and all others seem to be corners"
    if form:
        raise UsageError(f"{path}: {form}: write x, y, width, height in pixels")
    if (outside := sized & ((begin >= sizes) | (end <= 0)).any(1)).any():
        count = plural(int(outside.sum()), "box")
        _log.warning("%s: %s outside of the image, %s: correct or remove them", path, count, shown(outside))


def _is_crowd(path: str, one: Mapping[str, Any]) -> bool:
    try:
        return _CROWDS[one.get("iscrowd")]
    except (KeyError, TypeError):  # or a list
        why = f'"iscrowd" of annotation {one.get("id")} must be 0 or 1, not {one["iscrowd"]!r}'
        raise UsageError(f"{path}: {why}") from None


def _numbers(value: object) -> NDArray[np.float64] | None:
    """The value as an array of finite numbers, or None."""
    try:
        numbers = np.array(value)
    except ValueError:  # lists of different lengths
        return None
    return numbers.astype(np.float64) if numbers.dtype.kind in "iuf" and np.isfinite(numbers).all() else None


def _size(image: Mapping[str, Any]) -> tuple[int, int]:
    height, width = image.get("height"), image.get("width")
    return (height, width) if type(height) is int and type(width) is int else (0, 0)


def _located(path: str, root: str, names: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
    """Return the paths of images, and the indices of those that do not exist."""
    there = {f"{folder}/{name}".lstrip("/") for folder, names in list_tree(root, of="images").items() for name in names}
    local = "://" not in root

    def located(name: str) -> str | None:
        # An image that the listing lacks may exist: listed in another spelling, or outside the root.
        if name in there or "://" in name or (local and os.path.isfile(os.path.join(root, name))):
            return name
        ends = (name[slash.end() :] for slash in re.finditer("/", name))
        return next((end for end in ends if end in there), None)

    places = [*map(located, names)]
    missing = tuple(index for index, place in enumerate(places) if place is None)
    if moved := [f"{place} for {name}" for name, place in zip(names, places, strict=True) if place not in (None, name)]:
        _log.warning("%s: %s found at the end of their paths, such as %s", path, plural(len(moved), "image"), moved[0])
    if len(missing) == len(names):
        raise UsageError(
            f"{plural(len(names), 'image')} of {path} cannot be found, such as {root}/{names[0]}: "
            + ("write slashes for backslashes" if "\\" in names[0] else "give the folder where their names begin")
        )
    return [place or name for name, place in zip(names, places, strict=True)], missing
