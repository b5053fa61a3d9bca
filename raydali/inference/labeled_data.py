"""Other labelled samples for a trained model, and samples without labels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raydali.data.sources import storage
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.files import absolute
from raydali.data.sources.formats import Scan, check_column_options, labeled_images, source_kind
from raydali.data.sources.image_folder import EXTENSIONS
from raydali.data.sources.labeled import LabeledFiles, LabeledSource
from raydali.data.sources.unlabeled import unlabeled_files
from raydali.errors import UsageError
from raydali.text import summarize


def labeled_like(data: str, config: Any, classes: Sequence[str] | None, scan: Scan | None = None) -> LabeledSource:  # noqa: ANN401
    """Open labelled samples for a model with these classes, of which some may be absent.

    Args:
        data: as `--data` of a job; of a folder with val/, its val/.
        config: the options of the run, for how lists are read.
        classes: those of the run; None: those of the data.
        scan: see `formats.labeled_images`.

    Raises:
        UsageError: they cannot be opened, or some have another class.
    """
    below = f"{data.rstrip('/')}/val"
    data = below if source_kind(data) == "folder" and storage.is_folder(absolute(below)) else data
    kind = source_kind(data)
    names = {"list": ("root", "label_column", "multi_label"), "parquet": ("label_column", "image_column")}.get(kind, ())
    columns: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    check_column_options(data, **columns)
    of_lists = None if kind == "folder" else classes
    (source,) = exclude(None, labeled_images(data, classes=of_lists, scan=scan, **columns))
    if classes is None or source.classes == tuple(classes):
        return source
    places = {name: place for place, name in enumerate(classes)}
    if unknown := [name for name in source.classes if name not in places]:
        raise UsageError(f"{data} has classes that the run lacks ({summarize(unknown, show=repr)}): remove them")
    labels = np.array([places[name] for name in source.classes])[source.labels]
    moved: LabeledSource = replace(source, labels=labels, classes=tuple(classes))  # type: ignore[type-var]
    return moved


def unlabeled(
    data: str, root: str | None, classes: Sequence[str], extensions: tuple[str, ...] = EXTENSIONS
) -> LabeledSource:
    """Open samples whose labels are unknown: all get the first class.

    Args:
        data: a folder, in which samples lie at any depth, or a list with a path in each line.
        root: the folder of relative paths in a list; None: the list's.
        classes: those of the run.
        extensions: those of samples in folders.

    Raises:
        UsageError: they cannot be opened.
    """
    files = unlabeled_files(data, root, extensions)
    labels = np.zeros(len(files), np.int64)
    return LabeledFiles(files.root, files.packed_paths, files.offsets, labels=labels, classes=tuple(classes))
