"""Warnings of validation sets that make the metrics meaningless; training goes on."""

import logging
from collections.abc import Sequence
from pathlib import Path

from raydali.data.sources.source import Source

_log = logging.getLogger(__name__)


def warn_of_one_class(classes: Sequence[str]) -> None:
    """Warn if all samples have one class: there is nothing to learn."""
    if len(classes) == 1:
        _log.warning("%r is the only class: loss 0 and top-1 1 will mean nothing; give data of two classes", *classes)


def warn_of_overlap(train: Source, val: Source) -> None:
    """Warn if the training samples are validated: both sets are the same files or copies of them."""
    if len(train) == len(val) and train.fingerprint == val.fingerprint:
        places = {0, len(train) // 2, len(train) - 1}
        if all(_may_be_one(train.path(id), val.path(id)) for id in places):
            _log.warning("the %d validation samples are the training samples: %s", len(val), _MEANING)


def warn_of_folder_inside(data: str, val_data: str) -> None:
    """Warn if the validation folder is inside the training folder, whose samples include it."""
    train, val = Path(data).expanduser().resolve(), Path(val_data).expanduser().resolve()
    if train.is_dir() and val != train and val.is_relative_to(train):
        _log.warning("the validation samples in %s lie inside of the training data %s: %s", val_data, data, _MEANING)


_MEANING = "figures of validation will say what was learnt by heart; give --val-data others"


def _may_be_one(one: str, other: str) -> bool:
    """Whether it is one file, or two of the same size."""
    try:
        return one == other or Path(one).stat().st_size == Path(other).stat().st_size
    except OSError:  # no local file
        return False
