"""The built-in images for detectors and segmentation networks without data: discs, rectangles and triangles on noise.

Colours are random, so that only the shape shows the class.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from raydali.data.index.cache import built_in_folder

CLASSES = "disc", "rectangle", "triangle"
_IMAGES = {"train": 300, "val": 60}
_SIDES = (128, 160)
"""Smallest and largest height and width of images, pixels."""
_EXTENTS = (24, 64)
"""Smallest and largest height and width of shapes, pixels."""
_MAX_SHAPES = 3
_ATTEMPTS = 20


def shapes_folder() -> str:
    """Return the folder of `train/` (300 images), `val/` (60) and `annotations/instances_{train,val}.json`.

    See `built_in_folder`. Images contain 0 to 3 shapes, which do not touch.

    Raises:
        UsageError: the cache cannot be written.
    """
    return built_in_folder("shapes-v1", _write)


def masked_shapes_folder() -> str:
    """Return the folder of `train/` and `val/` with the same images in `images/`, and masks of shapes in `masks/`.

    The background is class 0, and CLASSES follow, as in `classes.txt`; see `shapes_folder`.
    """
    return built_in_folder("masked-shapes-v2", _write_masks)


def _write_masks(folder: Path) -> None:
    for split, (name, count) in enumerate(_IMAGES.items()):
        for kind in ("images", "masks"):
            (folder / name / kind).mkdir(parents=True)
        for id in range(count):
            image, shapes = _draw(np.random.default_rng([split, id]))
            image.save(folder / name / "images" / f"{id:04}.jpg", quality=92)
            _mask(image.size, shapes).save(folder / name / "masks" / f"{id:04}.png")
    (folder / "classes.txt").write_text("\n".join(["background", *CLASSES]))


def _mask(size: tuple[int, int], shapes: list[tuple[int, tuple[int, int, int, int]]]) -> Any:  # noqa: ANN401 (Pillow's)
    from PIL import Image, ImageDraw

    mask = Image.new("L", size)
    canvas = ImageDraw.Draw(mask)
    for category, box in shapes:
        _fill(canvas, category, box, category)
    return mask


def _fill(canvas: Any, category: int, box: tuple[int, int, int, int], colour: Any) -> None:  # noqa: ANN401 (Pillow's)
    left, top, right, bottom = box
    drawn = left, top, right - 1, bottom - 1  # Pillow's last pixels are inside
    if category == 1:
        canvas.ellipse(drawn, fill=colour)
    elif category == 2:
        canvas.rectangle(drawn, fill=colour)
    else:
        canvas.polygon([((left + right) / 2, top), (left, drawn[3]), (drawn[2], drawn[3])], fill=colour)


def _write(folder: Path) -> None:
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
    for split, (name, count) in enumerate(_IMAGES.items()):
        (folder / name).mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for id in range(count):
            image, shapes = _draw(np.random.default_rng([split, id]))
            images.append({"id": id, "file_name": f"{id:04}.jpg", "height": image.height, "width": image.width})
            image.save(folder / name / images[-1]["file_name"], quality=92)
            for category, (left, top, right, bottom) in shapes:
                box = [left, top, right - left, bottom - top]
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": id, "category_id": category, "bbox": box, "iscrowd": 0}
                    | {"area": box[2] * box[3]}
                )
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(content))


def _draw(random: Generator) -> tuple[Any, list[tuple[int, tuple[int, int, int, int]]]]:
    """Draw an image; returns it with category and box (left, top, right, bottom) of each shape."""
    from PIL import Image, ImageDraw

    height, width = random.integers(_SIDES[0], _SIDES[1] + 1, 2).tolist()
    ground = random.integers(40, 216, 3)
    noise = random.normal(0, 20, (height, width, 3))
    image = Image.fromarray((ground + noise).clip(0, 255).astype(np.uint8))
    canvas = ImageDraw.Draw(image)
    shapes: list[tuple[int, tuple[int, int, int, int]]] = []
    wanted = int(random.integers(0, _MAX_SHAPES + 1))
    for _ in range(_ATTEMPTS):
        if len(shapes) == wanted:
            break
        high, wide = random.integers(_EXTENTS[0], _EXTENTS[1] + 1, 2).tolist()
        top, left = int(random.integers(0, height - high)), int(random.integers(0, width - wide))
        box = left, top, left + wide, top + high
        if any(max(left, o[0]) <= min(box[2], o[2]) and max(top, o[1]) <= min(box[3], o[3]) for _, o in shapes):
            continue
        # Far from the background's colour in each channel.
        colour = tuple(((ground + random.integers(80, 177, 3)) % 256).tolist())
        category = int(random.integers(1, len(CLASSES) + 1))
        _fill(canvas, category, box, colour)
        shapes.append((category, box))
    return image, shapes
