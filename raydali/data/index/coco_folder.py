"""Training and validation images with boxes: a folder laid out like COCO, Roboflow or YOLO, or four paths."""

import re

import numpy as np

from raydali.data.index.coco import Coco
from raydali.data.index.files import absolute
from raydali.data.index.listing import entries_or_none, list_tree
from raydali.data.index.yolo import DESCRIPTION, yolo_split
from raydali.errors import UsageError

ROBOFLOW = "_annotations.coco.json"
"""The name that Roboflow gives annotations, beside their images."""


def train_and_val(
    data: str, annotations: str | None = None, val_data: str | None = None, val_annotations: str | None = None
) -> tuple[Coco, Coco]:
    """Index the training and the validation images, which have the same classes.

    Args:
        data: a folder or URI laid out like COCO: images in train/ and val/, or in folders whose names begin so
            (train2017), and annotations/instances_NAME.json for each; or like Roboflow's, with _annotations.coco.json
            beside the images in train/ and valid/; or YOLO's data.yaml, or a folder with it. With the other three, the
            training images only.
        annotations: JSON of the training images.
        val_data: the validation images.
        val_annotations: their JSON.

    Raises:
        UsageError: they cannot be indexed; their classes differ; no boxes in one of them; some but not all of the
            three.
    """
    if annotations and val_data and val_annotations:
        train, val = Coco.from_file(annotations, data), Coco.from_file(val_annotations, val_data)
    elif annotations or val_data or val_annotations:
        raise UsageError(
            "--annotations, --val-data and --val-annotations need each other, with training images in --data: give "
            "all four, or only --data"
        )
    else:
        train, val = (one_split(absolute(data), split) for split in ("train", "val"))
    for images in (train, val):
        if images.crowd.all():
            raise UsageError(
                f"{images}: every box has iscrowd=1, so there is nothing to learn: give annotations of single objects"
            )
    if train.classes != val.classes or not np.array_equal(train.category_ids, val.category_ids):
        one, other = ({*zip(a.category_ids.tolist(), a.classes, strict=True)} for a in (train, val))
        raise UsageError(
            f"the categories of {val} and {train} differ, such as {min(one ^ other)}, which only one has: "
            f"give both the same ids and names"
        )
    return train, val


def one_split(root: str, split: str) -> Coco:
    """Index the images of a folder laid out like COCO, by its annotations/instances_SPLIT*.json, Roboflow or YOLO.

    Args:
        root: from `files.absolute`; or YOLO's YAML file.
        split: train or val. The root itself may be the latter, if it has Roboflow's annotations.

    Raises:
        UsageError: there is not exactly one such file, or it cannot be indexed.
    """
    if root.endswith((".yaml", ".yml")):
        return yolo_split(root, split)
    for folder in (root, f"{root}/val", f"{root}/valid") if split == "val" else (f"{root}/{split}",):
        if any(entry.name == ROBOFLOW for entry in entries_or_none(folder)):
            return Coco.from_file(f"{folder}/{ROBOFLOW}", folder)
    there = {entry.name for entry in entries_or_none(root)}
    if DESCRIPTION in there:
        return yolo_split(f"{root}/{DESCRIPTION}", split)
    if {"images", "labels"} <= there and "annotations" not in there:
        raise UsageError(f"{root} has images/ and labels/ but no {DESCRIPTION}: write one with names, train and val")
    folder = f"{root}/annotations"
    names = list_tree(folder, of=f"annotations as instances_{split}.json, or {split}/{ROBOFLOW} or {DESCRIPTION}")[""]
    files = sorted(name for name in names if re.fullmatch(rf"instances_{split}\w*\.json", name))
    if len(files) != 1:
        what = " and ".join(files) if files else f"no instances_{split}.json"
        raise UsageError(
            f"{folder} has {what}: give a folder of COCO, Roboflow or YOLO, or to a job also --annotations, --val-data "
            "and --val-annotations"
        )
    return Coco.from_file(f"{folder}/{files[0]}", f"{root}/{files[0].removeprefix('instances_').removesuffix('.json')}")
