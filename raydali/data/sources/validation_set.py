"""What makes the figures of a validation worth nothing: it is said before training, and trained all the same."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from raydali.data.sources.source import Source

_log = logging.getLogger(__name__)


def warn_of_one_class(classes: Sequence[str]) -> None:
    """Say that there is nothing to learn where all samples are of one class."""
    if len(classes) == 1:
        _log.warning("%r is the only class: loss 0 and top-1 1 will mean nothing; give data of two classes", *classes)


def warn_of_overlap(train: Source, val: Source) -> None:
    """Say that samples are validated that are trained on: both sets are one, at one place or as copies."""
    if len(train) == len(val) and train.fingerprint == val.fingerprint:
        places = {0, len(train) // 2, len(train) - 1}
        if all(_may_be_one(train.path(id), val.path(id)) for id in places):
            _log.warning("the %d validation samples are the training samples: %s", len(val), _MEANING)


def warn_of_folder_inside(data: str, val_data: str) -> None:
    """Say that samples are validated that are trained on: the validation folder lies in that of training."""
    train, val = Path(data).expanduser().resolve(), Path(val_data).expanduser().resolve()
    if train.is_dir() and val != train and val.is_relative_to(train):
        _log.warning("the validation samples in %s lie inside of the training data %s: %s", val_data, data, _MEANING)


_MEANING = "figures of validation will say what was learnt by heart; give --val-data others"


def _may_be_one(one: str, other: str) -> bool:
    """Return whether it is one file, or two of one size."""
    try:
        return one == other or os.path.getsize(one) == os.path.getsize(other)
    except OSError:  # no local file
        return False
