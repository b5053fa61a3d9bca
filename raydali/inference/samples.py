"""Opens the samples that a trained model answers for: its run's own, others with labels, or others without.

    evaluate, export   --data   --> labeled_samples     --> samples, and the classes in the order of the model's outputs
    predict            the path --> unlabeled_samples   -->

A job of a task of raydali's opens other data than its own in fewer forms than these commands take: one folder without
train/ and val/, a list, samples of some of the classes. Other jobs open whatever is given, as in training.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.coco import Coco
from raydali.data.index.coco_folder import one_split
from raydali.data.index.exclusion import exclude
from raydali.data.index.file_list import is_list
from raydali.data.index.files import absolute
from raydali.data.index.folder_layout import TRAINING, VALIDATION
from raydali.data.index.formats import (
    check_column_options,
    labeled_images,
    packed_images,
    source_kind,
    unlabeled_files,
)
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import IMAGE_EXTENSIONS, LabeledFiles, LabeledSource
from raydali.data.index.masked_images import MaskedImages
from raydali.data.index.source import classes_of
from raydali.data.read.storage import is_folder
from raydali.data.tasks import classification
from raydali.data.video.clips import EXTENSIONS, VideoClips, scan_videos
from raydali.errors import RaydaliError, UsageError
from raydali.inference.trained_run import TrainedRun
from raydali.options.subjects import MultiLabelOptions
from raydali.run.data_contents import compared_contents
from raydali.text import summarize

Samples = tuple[Any, tuple[str, ...]]
"""A source, and the classes in the order of the model's outputs; none if it has no output for each."""

_log = logging.getLogger(__name__)


def labeled_samples(
    run: TrainedRun, data: str | None = None, *, root: str | None = None, label_column: str | None = None
) -> Samples:
    """Open samples with their truth.

    Args:
        run: the trained run.
        data: as `--data` of the job; of a folder with val/, its val/. None: the validation samples of the run.
        root: the folder of relative paths in a list. Default: the list's folder.
        label_column: of a list or of Parquet files. Default: the run's.

    Raises:
        UsageError: they cannot be opened, or have other classes than the run.
    """
    if data is None:
        train, source = run.data.train, run.data.val
        classes, opened = classes_of(train), [train, source]
        if run.classes is not None and run.classes != classes:
            raise UsageError(f"{train} has other classes than the run {run.folder} had: give --data")
        if run.settings.get("fingerprint") not in (None, train.fingerprint):
            _log.warning("%s is not what %s was trained on: it may have seen validation samples", train, run.folder)
    else:
        check_column_options(data, root=root, label_column=label_column)
        source = _others(run, data, root, label_column)
        classes, opened = classes_of(source), [source]
    # Samples with other names and labels than the run's are other data, of which nothing is said.
    if changed := compared_contents(run.folder, opened)[0]:
        _log.warning("files have other contents than when %s read them: %s", run.folder, changed)
    if run.classes and classes and run.classes != classes:
        differ = [f"{i}: {a!r}, {b!r}" for i, (a, b) in enumerate(zip_longest(run.classes, classes)) if a != b]
        raise UsageError(
            f"the classes of the run {run.folder} and of {data} differ ({summarize(differ)}): give data with the "
            "classes of the run, in their order"
        )
    return source, classes if run.classes is None else run.classes


def _others(run: TrainedRun, data: str, root: str | None, label_column: str | None) -> Any:  # noqa: ANN401 (a source)
    """Open other samples with their truth, with the classes of the run where the task is raydali's own."""
    config, task = run.config, run.job.task
    if task == "restoration":
        return ImagePairs.scan(data, config.inputs, config.targets)
    if task in ("classification", "video"):
        files = _labeled_files(run, data, root, label_column)
        return files if task == "classification" else _clips(run, files)
    if task == "detection":
        return _with_classes(run, data, *exclude(None, one_split(absolute(data), "val")))
    settings: dict[str, Any] = {"data": data}
    if task == "segmentation":  # all images of a list, or of a folder without train/ and val/
        is_whole = is_list(data) or is_folder(f"{absolute(data)}/{config.masks}")
        more = {"val_data": data if is_whole else None, "val_fraction": None, "fold": None, "val_group": None}
        settings |= {name: value for name, value in more.items() if hasattr(config, name)}
    source = run.job.open_data(replace(config, **settings)).val
    return _with_classes(run, data, source) if task == "segmentation" else source


def _labeled_files(run: TrainedRun, data: str, root: str | None, label_column: str | None) -> LabeledSource:
    below = f"{data.rstrip('/')}/val"
    data = below if source_kind(data) == "folder" and is_folder(absolute(below)) else data
    options = {name: getattr(run.config, name, None) for name in ("label_column", "image_column")}
    if label_column is not None:
        options["label_column"] = label_column
    scan = scan_videos if run.job.task == "video" else None
    several = isinstance(run.config, MultiLabelOptions) and run.config.multi_label
    files = labeled_images(data, root, run.classes, scan, multi_label=several, **options)
    labeled: LabeledSource = _with_classes(run, data, *exclude(None, files))
    return labeled


def _with_classes(run: TrainedRun, data: str, source: Any) -> Any:  # noqa: ANN401 (a source of one of three kinds)
    """Return a source whose labels are places among the classes of the run; all of its own if the run says none.

    Raises:
        UsageError: the run lacks a class that samples have.
    """
    names, classes = source.classes, run.classes
    if classes is None or names == classes:
        return source
    place_of = {name: place for place, name in enumerate(classes)}
    places = np.array([place_of.get(name, -1) for name in names])

    def among_classes(labels: NDArray[np.int64]) -> NDArray[np.int64]:
        if unknown := [names[label] for label in np.unique(labels) if places[label] < 0]:
            raise UsageError(f"{data} has classes that the run lacks ({summarize(unknown, show=repr)}): remove them")
        return places[labels]

    if isinstance(source, MaskedImages):
        values = np.arange(256, dtype=np.uint8)  # what is no class stays
        values[: len(names)] = among_classes(np.arange(len(names)))
        return replace(source, lookup=values[source.lookup], classes=classes)
    if isinstance(source, Coco):
        numbers = np.arange(1, len(classes) + 1)
        return replace(source, labels=1 + among_classes(source.labels - 1), classes=classes, category_ids=numbers)
    if splits := {*names} & {*TRAINING, *VALIDATION} - {*classes}:
        split = max(splits)
        raise UsageError(f"--data {data} has {split}/ but no val/: give --data {data.rstrip('/')}/{split}")
    return replace(source, labels=among_classes(source.labels), classes=classes)


def _clips(run: TrainedRun, videos: Any) -> VideoClips:  # noqa: ANN401 (labelled files of any kind)
    """Cut videos as the job's `open_data` has cut its own; as its options say if these cannot be opened."""
    names = "sequence_length", "stride", "step"
    settings = {name: getattr(run.config, name) for name in (*names, "skip_broken")}
    with suppress(RaydaliError, OSError, AttributeError):
        settings |= {name: getattr(run.data.val, name) for name in names}
    return VideoClips.index(videos, **settings)


def unlabeled_samples(run: TrainedRun, data: str, root: str | None = None) -> Samples:
    """Open samples without their truth, in the order of their listing; where labels are needed, all get the first one.

    Args:
        run: the trained run.
        data: a folder, in which files lie at any depth, a list with a path in each line, or shards of images.
        root: the folder of relative paths in a list. Default: the list's folder.

    Raises:
        UsageError: they cannot be opened, or the run does not say its classes and its data cannot be opened.
    """
    classes = labeled_samples(run)[1] if run.classes is None else run.classes
    task = run.job.task if run.job.predictions is None else None  # otherwise the job says what becomes of outputs
    if task == "video":
        return _clips(run, _unlabeled(data, root, EXTENSIONS, classes)), classes
    if task == "detection":
        return _without_boxes(data, root, classes), classes
    if task != "classification" and not isinstance(run.pipeline, classification.Images):
        return unlabeled_files(data, root, IMAGE_EXTENSIONS), classes
    packed = packed_images(data, image_column=getattr(run.config, "image_column", None), labeled=False)
    if packed is None:
        return _unlabeled(data, root, IMAGE_EXTENSIONS, classes), classes
    if root is not None:
        raise UsageError(f"--root {root} is only for lists, not for {data}: leave it out")
    return replace(packed, labels=np.zeros(len(packed), np.int64), classes=classes), classes


def _unlabeled(data: str, root: str | None, extensions: tuple[str, ...], classes: tuple[str, ...]) -> LabeledFiles:
    files = unlabeled_files(data, root, extensions)
    labels = np.zeros(len(files), np.int64)
    return LabeledFiles(files.root, files.packed_paths, files.offsets, labels=labels, classes=classes)


def _without_boxes(data: str, root: str | None, classes: Sequence[str]) -> Coco:
    images = unlabeled_files(data, root, IMAGE_EXTENSIONS)
    count = len(images)
    return Coco(
        images.root,
        images.packed_paths,
        images.offsets,
        sizes=np.zeros((count, 2), np.int64),
        image_ids=np.arange(count),
        first_boxes=np.zeros(count + 1, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        labels=np.zeros(0, np.int64),
        crowd=np.zeros(0, np.bool_),
        classes=tuple(classes),
        category_ids=np.arange(1, len(classes) + 1),
    )
