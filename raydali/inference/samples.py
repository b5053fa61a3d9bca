"""Opens other labelled samples for a trained model, and samples without labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.exclusion import exclude
from raydali.data.index.files import Files, absolute
from raydali.data.index.folder_layout import TRAINING, VALIDATION
from raydali.data.index.formats import (
    Scan,
    check_column_options,
    kind_and_files,
    labeled_images,
    packed_images,
    source_kind,
    unlabeled_files,
)
from raydali.data.index.labeled import IMAGE_EXTENSIONS, LabeledFiles, LabeledSource
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import summarize


def labeled_like(
    data: str,
    config: Any,  # noqa: ANN401 (a job's)
    classes: Sequence[str] | None,
    columns: Mapping[str, str | None],
    scan: Scan | None = None,
) -> LabeledSource:
    """Open labelled samples for a model with these classes, of which some may be absent.

    Args:
        data: as `--data` of a job; of a folder with val/, its val/.
        config: the options of the run, for how lists are read.
        classes: the classes of the run; None: the classes of the data.
        columns: "root" and "label_column" of the data. Default: the list's folder, and the run's column.
        scan: see `formats.labeled_images`.

    Raises:
        UsageError: they cannot be opened, or some have another class.
    """
    below = f"{data.rstrip('/')}/val"
    data = below if source_kind(data) == "folder" and storage.is_folder(absolute(below)) else data
    kind = source_kind(data) if scan is not None else kind_and_files(data)[0]
    names = {"list": ("label_column", "multi_label"), "parquet": ("label_column", "image_column")}.get(kind, ())
    options: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    options |= {name: value for name, value in columns.items() if value is not None}
    check_column_options(data, **options)
    of_lists = None if kind == "folder" else classes
    (source,) = exclude(None, labeled_images(data, classes=of_lists, scan=scan, **options))
    if classes is None or source.classes == tuple(classes):
        return source
    if splits := sorted({*source.classes} & {*TRAINING, *VALIDATION} - {*classes}):
        raise UsageError(f"--data {data} has {splits[-1]}/ but no val/: give --data {data.rstrip('/')}/{splits[-1]}")
    return replace(source, labels=labels_among(classes, source.classes, source.labels, data), classes=tuple(classes))


def labels_among(
    classes: Sequence[str], names: Sequence[str], labels: NDArray[np.int64], data: str
) -> NDArray[np.int64]:
    """Return labels as places among the classes of a run, int64 (N,).

    Args:
        classes: of the run.
        names: of the classes of the data.
        labels: (N,), places among the names. A class without a label need not be one of the run.
        data: what the user gives, for messages.

    Raises:
        UsageError: the run lacks a class.
    """
    place_of = {name: place for place, name in enumerate(classes)}
    places = np.array([place_of.get(name, -1) for name in names])
    if unknown := [names[label] for label in np.unique(labels) if places[label] < 0]:
        raise UsageError(f"{data} has classes that the run lacks ({summarize(unknown, show=repr)}): remove them")
    return places[labels]


def unlabeled(data: str, config: Any, classes: Sequence[str], root: str | None = None) -> LabeledSource:  # noqa: ANN401
    """Open images whose labels are unknown: all get the first class.

    Args:
        data: a folder, in which images lie at any depth, a list with a path in each line, or shards.
        config: the options of the run, for the column of images in Parquet files.
        classes: the classes of the run.
        root: the folder of relative paths in a list; None: the list's.

    Raises:
        UsageError: they cannot be opened.
    """
    source = packed_images(data, image_column=getattr(config, "image_column", None), labeled=False)
    if source is None:
        return unlabeled_like(unlabeled_files(data, root, IMAGE_EXTENSIONS), classes)
    if root is not None:
        raise UsageError(f"--root {root} is only for lists, not for {data}: leave it out")
    return replace(source, labels=np.zeros(len(source), np.int64), classes=tuple(classes))


def unlabeled_like(files: Files, classes: Sequence[str]) -> LabeledFiles:
    """Give files without labels the first class."""
    labels = np.zeros(len(files), np.int64)
    return LabeledFiles(files.root, files.packed_paths, files.offsets, labels=labels, classes=tuple(classes))
