"""Finds what kind of data the user's --data names, and indexes labelled images or videos of each kind.

The kinds are class folders, a list of paths and labels, tar shards, TFRecord files, Parquet files, and IDX files.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, overload

from raydali.data.sources.file_list import ENDINGS, FileList, is_list
from raydali.data.sources.folder_layout import train_and_val_folders
from raydali.data.sources.idx import IdxImages, idx_folder, names_idx
from raydali.data.sources.image_folder import EXTENSIONS, ImageFolder
from raydali.data.sources.labeled import LabeledFiles, LabeledSource, check_classes
from raydali.data.sources.parquet import Parquet, names_parquet, parquet_folder
from raydali.data.sources.tar import TarShards, holds_shards, names_shards
from raydali.data.sources.tfrecord import TFRecords, names_tfrecords
from raydali.data.sources.validation_set import (
    DEFAULT_FRACTION,
    split,
    warn_of_folder_inside,
    warn_of_one_class,
    warn_of_overlap,
)
from raydali.errors import UsageError
from raydali.text import summarize

Kind = Literal["folder", "list", "tar", "tfrecord", "parquet", "idx"]
Scan = Callable[[str], LabeledFiles]
_SPLITS = {"train", "val", "test"}
_WEIGHTS = (".pth", ".pt", ".safetensors")


def source_kind(data: str) -> Kind:
    """Return the kind of source that a name has by its form. A folder may hold tar shards: see `holds_shards`.

    Raises:
        UsageError: it is a file of another kind.
    """
    if names_idx(data):
        return "idx"
    if names_parquet(data):
        return "parquet"
    if names_tfrecords(data):
        return "tfrecord"
    if names_shards(data):
        return "tar"
    _refuse_other_files(data)
    return "list" if is_list(data) else "folder"


def _refuse_other_files(data: str) -> None:
    name, local = data.lower(), os.path.expanduser(data)
    if os.path.isdir(local):
        return
    if name.endswith((".zip", ".7z", ".rar")):
        raise UsageError(f"{data} is an archive: unpack it, and give its folder")
    if not os.path.isfile(local) or name.endswith(ENDINGS):  # of a list, list_lines.py tells what is wrong
        return
    if name.endswith(EXTENSIONS):
        folder = Path(local).absolute().parent.parent
        raise UsageError(f"{data} is an image: give a folder of class folders, such as {folder}, or a list")
    with suppress(OSError), Path(local).open("rb") as file:  # the list's reader tells why a file cannot be read
        if b"\0" not in file.read(4096):
            return
        if name.endswith(_WEIGHTS):
            raise UsageError(f"{data} holds weights, not samples: give it as --weights, and a folder or a list as data")
        raise UsageError(f"{data} is a binary file of no known kind: give a folder, or a list, which is UTF-8 text")


def labeled_images(
    data: str,
    root: str | None = None,
    classes: Sequence[str] | None = None,
    scan: Scan | None = None,
    *,
    label_column: str | None = None,
    image_column: str | None = None,
    multi_label: bool = False,
) -> LabeledSource:
    """Index labelled images of any kind.

    Class folders are indexed by `ImageFolder.scan`, a list by `FileList.from_file`, tar shards by `TarShards.scan`,
    TFRecord files by `TFRecords.scan`, Parquet files by `Parquet.scan`, and IDX files by `IdxImages.scan`.

    Args:
        data: a folder, a list, shards, TFRecord, Parquet or IDX files; local, or an `s3://` or `gs://` URI.
        root: the folder of a list's relative paths; unused with other kinds.
        classes: those that a list or shards of any kind may contain; a folder has its own.
        scan: indexes a folder of other files than images; then `data` is such a folder or a list.
        label_column: the column with the labels, see `FileList.from_file` and `Parquet.scan`; unused with other kinds.
        image_column: the column of Parquet files with the images; unused with other kinds.
        multi_label: whether each column of a list is a label.

    Raises:
        UsageError: it cannot be indexed.
    """
    kind = source_kind(data)
    if kind == "list":
        return FileList.from_file(data, root, classes, label_column=label_column, multi_label=multi_label)
    if scan is not None:
        return scan(data)
    if kind == "idx":
        return IdxImages.scan(data, classes)
    if kind == "parquet":
        return Parquet.scan(data, classes, image_column=image_column, label_column=label_column)
    if kind == "tfrecord":
        return TFRecords.scan(data, classes)
    if kind == "tar" or holds_shards(data):
        return TarShards.scan(data, classes)
    if files := parquet_folder(data):
        pattern = next(iter(files.values()))
        if len(files) > 1:
            raise UsageError(f"{data} has Parquet files of {summarize(files)}: give '{pattern}'")
        return Parquet.scan(pattern, classes, image_column=image_column, label_column=label_column)
    if files := idx_folder(data):
        if len(files) > 1:
            raise UsageError(f"{data} has IDX files of {summarize(files)}: give {next(iter(files.values()))}")
        return IdxImages.scan(next(iter(files.values())), classes)
    images = ImageFolder.scan(data)
    if {"train"} < {*images.classes} <= _SPLITS:
        raise UsageError(f"{data} has {' and '.join(images.classes)}, not classes: give {data.rstrip('/')}/train")
    return images


@overload
def train_and_val(
    data: str,
    val_data: str | None = None,
    root: str | None = None,
    *,
    val_fraction: float | None = None,
    label_column: str | None = None,
    image_column: str | None = None,
    multi_label: bool = False,
) -> tuple[LabeledSource, LabeledSource]: ...


@overload
def train_and_val(
    data: str,
    val_data: str | None = None,
    root: str | None = None,
    *,
    val_fraction: float | None = None,
    label_column: str | None = None,
    image_column: str | None = None,
    multi_label: bool = False,
    scan: Scan,
) -> tuple[LabeledFiles, LabeledFiles]: ...


def train_and_val(
    data: str,
    val_data: str | None = None,
    root: str | None = None,
    *,
    val_fraction: float | None = None,
    label_column: str | None = None,
    image_column: str | None = None,
    multi_label: bool = False,
    scan: Scan | None = None,
) -> tuple[LabeledSource, LabeledSource]:
    """The training and the validation images, of the same classes. Warns if validation would be meaningless.

    Without `val_data`, they are those in `train/` and `val/` of a folder. Class folders without these are split, see
    `split`; with `val_fraction`, a list or shards are split too.

    Args:
        data: a folder, of class folders or of tar shards, a list, or shards.
        val_data: the validation images, as `labeled_images` takes them.
        root: the folder of relative paths in lists. Default: the folder of each list.
        val_fraction: the share of the images that validates. Default: 0.1 of class folders.
        label_column: the column of a list or of Parquet files with the labels.
        image_column: the column of Parquet files with the images.
        multi_label: whether each column of a list is a label.
        scan: indexes folders of other files than images.

    Raises:
        UsageError: they cannot be indexed; their classes differ; one list, or shards, but neither two nor a fraction; a
            root but no list.
    """
    of_list = partial(
        labeled_images,
        root=root,
        scan=scan,
        label_column=label_column,
        image_column=image_column,
        multi_label=multi_label,
    )
    check = partial(
        check_column_options, root=root, label_column=label_column, image_column=image_column, multi_label=multi_label
    )
    if val_data is None:
        folders = _folders(data, val_fraction)
        if folders is None:
            check(data)
            train, val = split(of_list(data), val_fraction or DEFAULT_FRACTION)
            if not multi_label:
                warn_of_one_class(train.classes)
            return train, val
        data, val_data = folders
    elif val_fraction is not None:
        raise UsageError(
            f"--val-fraction {val_fraction} and --val-data {val_data} exclude each other: give one of them"
        )
    check(data, val_data)
    train = of_list(data)
    val = of_list(val_data, classes=train.classes)
    check_classes(train, val)
    if not multi_label:
        warn_of_one_class(train.classes)
    warn_of_overlap(train, val)
    warn_of_folder_inside(data, val_data)
    return train, val


def _folders(data: str, val_fraction: float | None) -> tuple[str, str] | None:
    """The folders of training and validation samples; None for data to be split."""
    kind = source_kind(data)
    if kind == "folder":
        return train_and_val_folders(data, val_fraction)
    if val_fraction is None:
        what, other = ("lists", "a list") if kind == "list" else ("names", "shards")
        raise UsageError(
            f"--data {data} {what} only training images: give --val-data too, {other} or a folder, or "
            f"--val-fraction {DEFAULT_FRACTION}"
        )
    return None


def check_column_options(
    *data: str,
    root: str | None = None,
    label_column: str | None = None,
    image_column: str | None = None,
    multi_label: bool = False,
) -> None:
    """Refuse the options of lists and of Parquet if none of the data is such, and several labels if not all are lists.

    Raises:
        UsageError: names both.
    """
    kinds = [source_kind(each) for each in data]
    kinds = ["parquet" if kinds[i] == "folder" and parquet_folder(each) else kinds[i] for i, each in enumerate(data)]
    for option, value, of in (
        ("root", root, {"list": "lists"}),
        ("label-column", label_column, {"list": "lists", "parquet": "Parquet"}),
        ("image-column", image_column, {"parquet": "Parquet"}),
    ):
        if value is not None and not of.keys() & {*kinds}:
            only = " and ".join(of.values())
            raise UsageError(f"--{option} {value} is only for {only}, not for {' and '.join(data)}: leave it out")
    if multi_label and {*kinds} != {"list"}:
        other = next(each for each, kind in zip(data, kinds, strict=True) if kind != "list")
        raise UsageError(f"--multi-label needs a list with a column for each label, not {other}: give one")
