"""Validation samples: split off the training samples, or warned of where they make the metrics meaningless.

    --val-fraction F    those validate whose hash is below a share of all hashes
    --fold K/N          every N-th validates, in the order of classes and hashes
    --val-group REGEX   the same, of the texts that the regular expression finds in the paths

`split` chooses them by a hash of each path or text: the same on every machine, at any root and for any seed. With a
share, further samples do not move others; only the two with the lowest and the highest hash of a class have fixed
places, so that each class is on both sides. Folds have equal shares of each class instead.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.file_list import column_texts, is_list
from raydali.data.index.source import Source, classes_of
from raydali.data.read.storage import UNKNOWN, version_of
from raydali.errors import UsageError
from raydali.text import plural, summarize

DEFAULT_FRACTION = 0.1
COLUMN = "column:"
"""Begins a group that is a column of a list."""
_KEY = b"raydali validation samples"  # to change it would move samples of runs that are resumed


AnySource = TypeVar("AnySource", bound=Any)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """The choice of validation samples, as options ask for it; false if none of them is given.

    Args:
        fraction: the share of the samples that validates, above 0 and below 1. None: DEFAULT_FRACTION.
        fold: K/N, of which the K-th of N folds validates.
        group: samples stay together in whose paths this regular expression finds the same texts in its groups; or
            column:NAME, that have the same text in this column of a list. Other paths are groups of their own.

    Raises:
        UsageError: a fold out of its range, or beside a fraction; a regular expression that is none, or has no group.
    """

    fraction: float | None = None
    fold: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None and self.fraction is not None:
            raise UsageError(f"--fold {self.fold} and --val-fraction {self.fraction} exclude each other: give one")
        if self.fold is not None:
            numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.fold)
            if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]) or int(numbers[2]) < 2:
                raise UsageError(f"--fold must be K/N, 1/N to N/N with N from 2 on, such as 1/5, not {self.fold}")
        if self.group is not None and self.column is None:
            try:
                groups = re.compile(self.group).groups
            except re.error as error:
                raise UsageError(f"--val-group {self.group} is no regular expression: {error}; correct it") from error
            if not groups:
                raise UsageError(
                    f"--val-group {self.group} has no group: put in parentheses what samples share, such as (\\d+)_"
                )

    def __bool__(self) -> bool:
        """Return whether any option is given."""
        return self != Split()

    def __str__(self) -> str:
        """Return the options as they are given."""
        given = {"val-fraction": self.fraction, "fold": self.fold, "val-group": self.group}
        return " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)

    @property
    def column(self) -> str | None:
        """The column of the groups."""
        return self.group.removeprefix(COLUMN) if self.group and self.group.startswith(COLUMN) else None

    def texts(self, source: Any, data: str, root: str | None) -> Iterable[str]:  # noqa: ANN401 (of any task)
        """Return the path of each sample, or the text that it shares with those that it stays with; see `split`."""
        if self.column is not None:
            if not is_list(data):
                raise UsageError(f"{self} is only for lists, not for {data or source}: give a regular expression")
            return column_texts(data, root, self.column)
        return source.relative_paths() if self.group is None else self._found(source.relative_paths(), self.group)

    def _found(self, paths: Iterable[str], group: str) -> Iterator[str]:
        search, without, total = re.compile(group).search, list[str](), 0
        for path in paths:
            total, found = total + 1, search(path)
            if found is None:
                without.append(path)
            yield path if found is None else "\0".join(text or "" for text in found.groups())
        if len(without) == total:
            raise UsageError(f"--val-group {group} matches no path, such as {without[0]!r}: correct it")
        if without:
            shown = summarize(without, show=repr)
            _log.warning("--val-group %s matches nothing in %d of %d paths: %s", group, len(without), total, shown)


def split(source: AnySource, asked: Split, data: str = "", root: str | None = None) -> tuple[AnySource, AnySource]:
    """Return the training and the validation samples, both in the order of the source.

    Samples with the same text, such as a path that a list repeats, stay together. With a share, of each class the text
    with the lowest hash validates, and the one with the highest is trained on; with several labels a sample, of all
    samples. Folds are dealt out in the order of classes and hashes.

    Args:
        source: the samples of both: labelled ones, or pairs.
        asked: how they are split.
        data: the list that the source was made of, if it was, whose columns may be asked for.
        root: the folder of its relative paths. Default: the list's folder.

    Raises:
        UsageError: a class has only one sample, and names it; the groups cannot be found, or are too few.
    """
    texts = asked.texts(source, data, root)
    digests = (blake2b(os.fsencode(text), digest_size=8, key=_KEY).digest() for text in texts)
    hashes = np.frombuffer(b"".join(digests), "<u8")
    one_each = getattr(source, "one_each", None)
    labels = np.zeros(len(hashes), np.int64) if one_each is None else one_each
    present, places = np.unique(labels, return_inverse=True)
    lowest, highest = np.full(len(present), np.iinfo("u8").max, "u8"), np.zeros(len(present), "u8")
    np.minimum.at(lowest, places, hashes)
    np.maximum.at(highest, places, hashes)
    classes = classes_of(source) or ("all",)
    alone = [classes[label] for label in present[lowest == highest].tolist()]
    if alone and asked.group is None:
        raise UsageError(
            f"{source} has one sample of {summarize(alone, show=repr)}, which cannot both train and validate: add "
            "samples, or give --val-data"
        )
    if asked.fold or asked.group:
        _require_enough(source, asked, len(np.unique(hashes)))
    if asked.fold is not None:
        validates = _in_fold(hashes, labels, *map(int, asked.fold.split("/")))
    else:
        limit = int((asked.fraction or DEFAULT_FRACTION) * 2**64)
        validates = ((hashes < limit) | np.isin(hashes, lowest)) & ~np.isin(hashes, highest)
    if not validates.any():
        raise UsageError(f"{source}: {asked} lets no group validate, as each has all of a class: give smaller groups")
    if without := [classes[label] for label in np.setdiff1d(present, labels[validates]).tolist()]:
        _log.warning("%s: no sample validates of %s", source, summarize(without, show=repr))
    return source.drop(np.flatnonzero(validates)), source.drop(np.flatnonzero(~validates))


def _require_enough(source: Any, asked: Split, there: int) -> None:  # noqa: ANN401 (of any task)
    needed = 2 if asked.fold is None else int(asked.fold.partition("/")[2])
    if there < needed:
        noun = "path" if asked.group is None else "group"
        raise UsageError(
            f"{source} has {plural(there, noun)}, and {asked} needs {needed}: give fewer folds, or smaller groups"
        )


def _in_fold(hashes: NDArray[np.uint64], labels: NDArray[np.int64], number: int, folds: int) -> NDArray[np.bool_]:
    """Return which samples (N,) are in a fold: groups are dealt out by their first class, and then by their hash."""
    groups, of_sample = np.unique(hashes, return_inverse=True)
    first = np.full(len(groups), labels.max(initial=0))
    np.minimum.at(first, of_sample, labels)
    places = np.empty(len(groups), np.int64)
    places[np.argsort(first, kind="stable")] = np.arange(len(groups))
    in_fold: NDArray[np.bool_] = places[of_sample] % folds == number - 1
    return in_fold


def warn_of_overlap(train: Source, val: Source) -> None:
    """Warn if the training samples are validated: both sets are the same files or copies of them."""
    if len(train) == len(val) and train.fingerprint == val.fingerprint:
        pairs = [(train.path(id), val.path(id)) for id in {0, len(train) // 2, len(train) - 1}]
        if all(one == other or version_of(one) == version_of(other) != UNKNOWN for one, other in pairs):
            _log.warning("the %s are also the training samples: %s", plural(len(val), "validation sample"), _REMEDY)


def warn_of_folder_inside(data: str, val_data: str) -> None:
    """Warn if the validation folder is inside the training folder, whose samples include it."""
    train, val = Path(data).expanduser().resolve(), Path(val_data).expanduser().resolve()
    if train.is_dir() and val != train and val.is_relative_to(train):
        _log.warning("the validation samples of %s are part of the training data %s: %s", val_data, data, _REMEDY)


_REMEDY = "validation will not show how the model generalizes; give other --val-data"
