"""Files with one class each, or several labels, for classifiers of images and of videos."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.file_rules import describe_skipped, select_files, skip_root
from raydali.data.sources.files import Files, absolute, digest
from raydali.data.sources.listing import list_tree
from raydali.data.sources.source import Source
from raydali.errors import UsageError
from raydali.text import plural, summarize

# torchvision.datasets.folder.IMG_EXTENSIONS
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

_log = logging.getLogger(__name__)


class LabeledSource(Source, Protocol):
    """The protocol of a source for classifiers: N files by id 0..N-1, each with a class.

    `LabeledFiles` implements it, and `Shards`, whose files are parts of larger ones.
    """

    @property
    def labels(self) -> NDArray[Any]:
        """Indices into `classes`, int64 (N,); or for several labels each uint8 (N, C), 1 for those that it has."""

    @property
    def one_each(self) -> NDArray[np.int64] | None:
        """The labels, if each file has one."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """The number of files next to them that could be samples but are not read, by kind."""

    def files(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]] | NDArray[np.uint8]:
        """These files for a DALI graph, uint8 each: paths if `dali_reads`, with NULs after them or not, or contents."""

    def read(self, id: int) -> bytes:
        """The content of a file."""

    def relocate(self, root: str) -> Self:
        """The same index for a copy of the data at another root."""

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these samples."""

    @property
    def root(self) -> str:
        """The folder in which relative paths begin."""

    def relative_paths(self) -> Iterator[str]:
        """Yield the paths of all samples, relative to the root."""


@dataclass(frozen=True, eq=False)
class LabeledFiles(Files):
    """N files by id 0..N-1, and the class of each.

    Attributes:
        labels: int64 (N,), indices into classes; or uint8 (N, C), 1 for each label that a file has.
        classes: their names.
        skipped: the number of files next to them that could be samples but are not read, by kind.
    """

    labels: NDArray[Any]
    classes: tuple[str, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def one_each(self) -> NDArray[np.int64] | None:
        """The labels, if each file has one."""
        return self.labels if self.labels.ndim == 1 else None

    @classmethod
    def scan(cls, root: str, extensions: tuple[str, ...] = IMAGE_EXTENSIONS, kind: str = "images") -> Self:
        """Index the files in the class folders of a root, sorted by class, folder and name; classes are sorted too.

        Classes, files and order are those of `torchvision.datasets.ImageFolder`, so that labels and ids mean the same
        in both. But hidden folders, such as .ipynb_checkpoints, are no classes, an unreadable folder is an error, and a
        link to a folder above itself is left out. Warns of empty classes, which stay, and of files that could be
        samples but are not read.

        Args:
            root: a local path (`~` is expanded), or an `s3://` or `gs://` URI, reached as
                `storage.file_system` says.
            extensions: those of samples, in lower case; the files' own may be in any case.
            kind: the name of the files in messages.

        Raises:
            UsageError: no such folder or bucket, or no right to read it; no class folders; no files with these
                extensions; an object whose name DALI cannot read.
        """
        root = absolute(root)
        listing, skipped = select_files(list_tree(root, of="class folders"), extensions)
        outside = len(listing.get("", ()))
        skip_root(listing, skipped)
        if not listing:
            above = f", such as {root.rpartition('/')[0]}" if outside else ""
            found = f", but {plural(outside, kind.removesuffix('s'))}" if outside else ""
            raise UsageError(
                f"{root} has no class folders{found}: give a folder with a folder of {kind} for each class{above}"
            )

        classes = sorted({folder.partition("/")[0] for folder in listing})
        counts = dict.fromkeys(classes, 0)
        chosen = {}
        for class_, folder in sorted((folder.partition("/")[0], folder) for folder in listing):
            chosen[folder] = sorted(listing.pop(folder))
            counts[class_] += len(chosen[folder])
        if not any(counts.values()):
            instead = f" ({describe_skipped(skipped.kinds)})" if skipped.kinds else ""
            needed = ", ".join(extensions)
            folders = plural(len(classes), "class folder")
            raise UsageError(f"{root} has {folders} without {kind}{instead}: give files that end in {needed}")
        skipped.warn(root, extensions)
        if empty := [class_ for class_ in classes if not counts[class_]]:
            _log.warning(
                "%s: %d of %s without %s: %s",
                root,
                len(empty),
                plural(len(classes), "class"),
                kind,
                summarize(empty, show=repr),
            )

        labels = np.repeat(np.arange(len(classes)), list(counts.values()))
        emptied = ((folder, chosen.pop(folder)) for folder in [*chosen])
        return cls.from_folders(root, emptied, labels=labels, classes=tuple(classes), skipped=skipped.kinds)

    def _only(self, kept: NDArray[np.int64]) -> dict[str, Any]:
        return super()._only(kept) | {"labels": self.labels[kept]}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of relative paths, labels and classes, 32 hex digits; without the root, so that the data may move."""
        classes, labels = os.fsencode("\0".join(self.classes)), self.labels.astype("<i8")
        return digest(classes, self.packed_paths.data, labels.data)


def allowed_labels(data: str, found: Sequence[str], allowed: Sequence[str]) -> NDArray[np.int64]:
    """Return the places of the labels that were found among those that are allowed, int64.

    Raises:
        UsageError: one is not allowed.
    """
    places = {name: place for place, name in enumerate(allowed)}
    if unknown := [name for name in found if name not in places]:
        shown = summarize(unknown, show=repr)
        raise UsageError(f"{data} has labels that the training set lacks, {shown}: give both the same classes")
    return np.array([places[name] for name in found])


def warn_of_renumbering(data: str, labels: Sequence[str]) -> None:
    """Warn that class indices differ from the labels, which are numbers."""
    order = plural(len(labels), "class"), summarize(labels, show=repr)
    _log.warning("%s: the labels are not class indices from 0, which gives %s in this order: %s", data, *order)


def check_classes(train: LabeledSource, val: LabeledSource) -> None:
    """Refuse a validation set whose classes differ from the training set's: its labels would mean something else.

    Raises:
        UsageError: names missing and additional classes, or states that their order differs.
    """
    missing, extra = (sorted({*a.classes} - {*b.classes}) for a, b in ((train, val), (val, train)))
    parts = [
        f"{what} {summarize(names, show=repr)}" for what, names in (("lacks", missing), ("also has", extra)) if names
    ]
    if parts:
        raise UsageError(
            f"{val} {' and '.join(parts)}, unlike the {plural(len(train.classes), 'class')} of {train}: "
            f"give both the same class folders; a folder may be empty"
        )
    if train.classes != val.classes:
        raise UsageError(
            f"{val} and {train} have the same classes in different order: folders are sorted by name, numbers in lists "
            "by value; give two lists or two folders"
        )
