"""Warnings of validation sets that make the metrics meaningless; training goes on."""

import logging
from collections.abc import Sequence
from pathlib import Path

from raydali.data.sources.source import Source
from raydali.text import plural

_log = logging.getLogger(__name__)


def warn_of_one_class(classes: Sequence[str]) -> None:
    """Warn if all samples have one class: there is nothing to learn."""
    if len(classes) == 1:
        _log.warning("%r is the only class, so that the metrics mean nothing: give at least two classes", *classes)


def warn_of_overlap(train: Source, val: Source) -> None:
    """Warn if the training samples are validated: both sets are the same files or copies of them."""
    if len(train) == len(val) and train.fingerprint == val.fingerprint:
        places = {0, len(train) // 2, len(train) - 1}
        if all(_may_be_one(train.path(id), val.path(id)) for id in places):
            _log.warning("the %s are also the training samples: %s", plural(len(val), "validation sample"), _REMEDY)


def warn_of_folder_inside(data: str, val_data: str) -> None:
    """Warn if the validation folder is inside the training folder, whose samples include it."""
    train, val = Path(data).expanduser().resolve(), Path(val_data).expanduser().resolve()
    if train.is_dir() and val != train and val.is_relative_to(train):
        _log.warning("the validation samples of %s are part of the training data %s: %s", val_data, data, _REMEDY)


_REMEDY = "validation will not show how the model generalizes; give other --val-data"


def _may_be_one(one: str, other: str) -> bool:
    """Return whether the paths name one file, or two files of the same size."""
    try:
        return one == other or Path(one).stat().st_size == Path(other).stat().st_size
    except OSError:  # no local file
        return False
