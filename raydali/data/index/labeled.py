"""Files with one class each, or several labels, for classifiers of images and of videos."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.file_rules import describe_skipped, select_files, skip_root
from raydali.data.index.files import Files, absolute, digest
from raydali.data.index.listing import list_tree
from raydali.data.index.shards import Shards
from raydali.errors import UsageError
from raydali.text import plural, summarize

# torchvision.datasets.folder.IMG_EXTENSIONS, and two more
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".avif", ".gif")


@dataclass(frozen=True, eq=False)
class LabeledFiles(Files):
    """N files by id 0..N-1, and the class of each.

    Attributes:
        labels: int64 (N,), indices into classes; uint8 (N, C), 1 for each label that a file has; or float32 (N, C),
            numbers that are to be estimated.
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

        Classes, files and order are as in `torchvision.datasets.ImageFolder`, so that labels and ids mean the same
        in both. But .avif and .gif are read, too, hidden folders, such as .ipynb_checkpoints, are no classes, an
        unreadable folder is an error, and a link to a folder above itself is left out. Empty classes stay. Warns of
        files that could be samples but are not read.

        Args:
            root: a local path (`~` is expanded), or an `s3://` or `gs://` URI, reached as
                `storage.file_system` says.
            extensions: the extensions of samples, in lower case; the files' own may be in any case.
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
            others = f", but {plural(outside, kind.removesuffix('s'))}" if outside else ""
            raise UsageError(
                f"{root} has no class folders{others}: give a folder with a folder of {kind} for each class{above}"
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
        labels = np.repeat(np.arange(len(classes)), list(counts.values()))
        emptied = ((folder, chosen.pop(folder)) for folder in [*chosen])
        return cls.from_folders(root, emptied, labels=labels, classes=tuple(classes), skipped=skipped.kinds)

    def _only(self, kept: NDArray[np.int64]) -> dict[str, Any]:
        return super()._only(kept) | {"labels": self.labels[kept]}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of relative paths, labels and classes, 32 hex digits; without the root, so that the data may move."""
        classes, labels = os.fsencode("\0".join(self.classes)), self.labels
        whole = labels if labels.dtype.kind == "f" else labels.astype("<i8")
        return digest(classes, self.packed_paths.data, whole.data)


LabeledSource = LabeledFiles | Shards
"""A source for classifiers: N files by id 0..N-1, each with a class, or parts of larger files."""


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
