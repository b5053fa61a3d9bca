"""Data sets in YOLO's folders."""

import shutil
from pathlib import Path

import numpy as np

from raydali.data.builtin.shapes import shapes_folder
from raydali.data.index.coco_folder import one_split

FOLDERS = "train: images/train\nval: images/val\n"
"""Lines of data.yaml."""


def shapes_in_yolo(root: Path) -> Path:
    """The built-in shapes in YOLO's folders, the classes with the numbers 10, 20 and 30; returns the root."""
    shapes = Path(shapes_folder())
    for split in ("train", "val"):
        coco = one_split(str(shapes), split)
        shutil.copytree(shapes / split, root / "images" / split)
        (root / "labels" / split).mkdir(parents=True)
        for id in range(len(coco)):
            size, boxes = coco.sizes[id, ::-1], coco.boxes[coco.boxes_of(id)].astype(np.float64)
            lines = np.hstack([(boxes[:, :2] + boxes[:, 2:]) / 2 / size, (boxes[:, 2:] - boxes[:, :2]) / size])
            text = [
                " ".join(map(str, (10 * label, *line)))
                for label, line in zip(coco.labels[coco.boxes_of(id)].tolist(), lines.tolist(), strict=True)
            ]
            if text:
                (root / "labels" / split / f"{id:04}.txt").write_text("\n".join(text))
    names = "".join(f"  {10 * number}: {name}\n" for number, name in enumerate(coco.classes, 1))
    (root / "data.yaml").write_text(f"{FOLDERS}names:\n{names}")
    return root
