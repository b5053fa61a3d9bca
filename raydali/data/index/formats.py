"""Finds what kind of data the user's --data names, and indexes images or videos of each kind.

The kinds are class folders, a list of paths and labels, tar shards, TFRecord files, and Parquet files.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from raydali.data.index.file_list import ENDINGS, FileList, is_list, listed_paths
from raydali.data.index.file_rules import select_files
from raydali.data.index.files import Files, absolute
from raydali.data.index.folder_layout import split_files, train_and_val_folders
from raydali.data.index.labeled import IMAGE_EXTENSIONS, LabeledFiles, LabeledSource, check_classes
from raydali.data.index.listing import list_tree
from raydali.data.index.parquet import Parquet, names_parquet, parquet_folder
from raydali.data.index.shards import Shards
from raydali.data.index.tar import TarShards, holds_shards, names_shards
from raydali.data.index.tfrecord import TFRecords, names_tfrecords
from raydali.data.index.validation_set import DEFAULT_FRACTION, Split, split, warn_of_folder_inside
from raydali.data.read.storage import is_folder
from raydali.errors import UsageError
from raydali.text import summarize

Kind = Literal["folder", "list", "tar", "tfrecord", "parquet"]
Scan = Callable[[str], LabeledFiles]
_SPLITS = {"train", "val", "test"}
_WEIGHTS = (".pth", ".pt", ".safetensors")


class ColumnOptions(TypedDict, total=False):
    """Options of lists and of Parquet files, as `labeled_images` takes them."""

    label_column: str | None
    image_column: str | None
    multi_label: bool


def source_kind(data: str) -> Kind:
    """Return the kind of source that a name has by its form. A folder may hold tar shards: see `holds_shards`.

    Raises:
        UsageError: it is a file of another kind.
    """
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
    if not os.path.isfile(local) or name.endswith(ENDINGS):  # of a list, its reader tells what is wrong
        return
    if name.endswith(IMAGE_EXTENSIONS):
        folder = Path(local).absolute().parent.parent
        raise UsageError(f"{data} is an image: give a folder of class folders, such as {folder}, or a list")
    with suppress(OSError), Path(local).open("rb") as file:  # the list's reader tells why a file cannot be read
        if b"\0" not in file.read(4096):
            return
        if name.endswith(_WEIGHTS):
            raise UsageError(f"{data} holds weights, not samples: give it as --weights, and a folder or a list as data")
        raise UsageError(f"{data} is a binary file of no known kind: give a folder, or a list, which is UTF-8 text")


def kind_and_files(data: str) -> tuple[Kind, list[str]]:
    """Return the kind of source as `source_kind` does, but of a folder the kind of the files in it.

    Returns:
        The kind, and `data`; of a folder with Parquet files, the pattern of the files of each split instead.

    Raises:
        UsageError: it is a file of another kind.
    """
    kind = source_kind(data)
    if kind != "folder":
        return kind, [data]
    if holds_shards(data):
        return "tar", [data]
    if parquet := parquet_folder(data):
        return "parquet", [*parquet.values()]
    return "folder", [data]


def split_roots(data: str, splits: tuple[str, str], *, files: bool) -> dict[str, str]:
    """Return the folder of each of two splits, or its Parquet files; none if data is not all of two splits.

    Args:
        data: local, or a URI.
        splits: the names of the folders.
        files: whether files are looked for if there are no such folders.

    Raises:
        UsageError: there are files of several splits, but not one for training and one for validation.
    """
    folders = [os.path.join(data, split) for split in splits]
    if all(is_folder(absolute(folder)) for folder in folders):
        return dict(zip(splits, folders, strict=True))
    patterns = split_files(data) if files and len(kind_and_files(data)[1]) > 1 else None
    return dict(zip(splits, patterns or (), strict=False))


def packed_images(
    data: str,
    classes: Sequence[str] | None = None,
    *,
    label_column: str | None = None,
    image_column: str | None = None,
    labeled: bool = True,
) -> Shards | None:
    """Index labelled images in shards, TFRecord or Parquet files; None for lists and for folders of other files.

    Args:
        data: see `labeled_images`, as for the next three.
        classes: those that may occur.
        label_column: of Parquet files.
        image_column: of Parquet files.
        labeled: False: labels are not read, and all images have the class '0'.

    Raises:
        UsageError: they cannot be indexed; a folder has files of several splits.
    """
    kind, files = kind_and_files(data)
    if len(files) > 1:
        raise UsageError(f"{data} has Parquet files of several splits: give one of {summarize(files, show=repr)}")
    if kind == "parquet":
        return Parquet.scan(files[0], classes, image_column=image_column, label_column=label_column, labeled=labeled)
    if kind == "tfrecord":
        return TFRecords.scan(data, classes, labeled=labeled)
    return TarShards.scan(data, classes, labeled=labeled) if kind == "tar" else None


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

    Class folders are indexed by `LabeledFiles.scan`, a list by `FileList.from_file`, tar shards by `TarShards.scan`,
    TFRecord files by `TFRecords.scan`, and Parquet files by `Parquet.scan`.

    Args:
        data: a folder, a list, shards, TFRecord or Parquet files; local, or an `s3://` or `gs://` URI.
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
    packed = packed_images(data, classes, label_column=label_column, image_column=image_column)
    if packed is not None:
        return packed
    images = LabeledFiles.scan(data)
    if {"train"} < {*images.classes} <= _SPLITS:
        raise UsageError(f"{data} has {' and '.join(images.classes)}, not classes: give {data.rstrip('/')}/train")
    return images


def train_and_val(
    data: str,
    val_data: str | None = None,
    root: str | None = None,
    *,
    val_fraction: float | None = None,
    fold: str | None = None,
    val_group: str | None = None,
    scan: Scan | None = None,
    **columns: Unpack[ColumnOptions],
) -> tuple[Any, Any]:
    """Return the training and the validation images, of the same classes. Warns if validation would be meaningless.

    Each is a `LabeledSource`, with `scan` what that makes. Without `val_data`, they are those in `train/` and `val/` of
    a folder. Class folders without these are split, see `split`; with one of the next three, a list or shards, too.

    Args:
        data: a folder, of class folders or of tar shards, a list, or shards.
        val_data: the validation images, as `labeled_images` takes them.
        root: the folder of relative paths in lists. Default: the folder of each list.
        val_fraction: the share of the images that validates, see `Split`. Default: 0.1 of class folders.
        fold: K/N, of which the K-th of N folds validates.
        val_group: which images stay together.
        scan: indexes folders of other files than images.
        columns: see `labeled_images`.

    Raises:
        UsageError: they cannot be indexed; their classes differ; one list, or shards, but neither two nor a split; a
            root but no list.
    """
    asked = Split(val_fraction, fold, val_group)
    if val_data is not None and asked:
        raise UsageError(f"{asked} and --val-data {val_data} exclude each other: give one of them")
    parts = (data, val_data) if val_data is not None else _folders(data, asked)
    check_column_options(*(parts or (data,)), root=root, **columns)
    if parts is None:
        return split(labeled_images(data, root, scan=scan, **columns), asked, data, root)
    train = labeled_images(parts[0], root, scan=scan, **columns)
    val = labeled_images(parts[1], root, train.classes, scan, **columns)
    check_classes(train, val)
    warn_of_folder_inside(*parts)
    return train, val


def _folders(data: str, asked: Split) -> tuple[str, str] | None:
    """The folders of training and validation samples; None for data to be split."""
    kind = source_kind(data)
    if kind == "folder":
        return train_and_val_folders(data, asked)
    if not asked:
        what, other = ("lists", "a list") if kind == "list" else ("names", "shards")
        raise UsageError(
            f"--data {data} {what} only training images: give --val-data too, {other} or a folder, or "
            f"--val-fraction {DEFAULT_FRACTION}"
        )
    return None


def check_column_options(*data: str, root: str | None = None, **columns: Unpack[ColumnOptions]) -> None:
    """Refuse the options of lists and of Parquet if none of the data is such, and several labels if not all are lists.

    Raises:
        UsageError: names both.
    """
    options: dict[str, object] = {"root": root, **columns}
    if not any(options.values()):
        return
    kinds = [kind_and_files(path)[0] for path in data]
    for name, needed in (("root", ["list"]), ("label_column", ["list", "parquet"]), ("image_column", ["parquet"])):
        if options.get(name) is not None and not {*needed} & {*kinds}:
            only = " and ".join({"list": "lists", "parquet": "Parquet"}[kind] for kind in needed)
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise UsageError(f"{option} is only for {only}, not for {' and '.join(data)}: leave it out")
    if columns.get("multi_label") and {*kinds} != {"list"}:
        other = next(path for path, kind in zip(data, kinds, strict=True) if kind != "list")
        raise UsageError(f"--multi-label needs a list with a column for each label, not {other}: give one")


def unlabeled_files(data: str, root: str | None, extensions: tuple[str, ...]) -> Files:
    """Index the files of a folder, sorted by folder and name, or of a list, in the order of its lines.

    Args:
        data: a folder, in which files lie at any depth, or a list with a path in each line, which other fields may
            follow, as in lists with labels; local (`~` is expanded), or an `s3://` or `gs://` URI.
        root: the folder of relative paths in a list; None: the list's.
        extensions: the extensions of samples in folders, in lower case.

    Raises:
        UsageError: it cannot be read, or has no such files.
    """
    place = absolute(data)
    if source_kind(data) == "list":
        paths = [*listed_paths(place)]
        if not paths:
            raise UsageError(f"{data} is empty: give a list with a path in each line")
        return Files.from_list(absolute(root) if root is not None else place.rpartition("/")[0], paths)
    if root is not None:
        raise UsageError(f"--root {root} is only for lists, not for {data}: leave it out")
    listing, skipped = select_files(list_tree(place, of="samples"), extensions)
    skipped.warn(place, extensions)
    names = [(folder, sorted(listing[folder])) for folder in sorted(listing) if listing[folder]]
    if not names:
        raise UsageError(f"{data} has no samples: give files that end in {', '.join(extensions)}")
    return Files.from_folders(place, names)
