"""Validation samples: split off the training samples, or warned of where they make the metrics meaningless.

`split` chooses them by a hash of each path: the same on every machine, at any root and for any seed. A sample validates
if its hash is below a share of all hashes. So further samples do not move others; only the two with the lowest and the
highest hash of a class have fixed places, so that each class is on both sides.
"""

import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raydali.data.index.source import Source, classes_of
from raydali.data.read.storage import UNKNOWN, version_of
from raydali.errors import UsageError
from raydali.text import plural, summarize

DEFAULT_FRACTION = 0.1
_KEY = b"raydali validation samples"  # to change it would move samples of runs that are resumed


AnySource = TypeVar("AnySource", bound=Any)


def split(source: AnySource, fraction: float) -> tuple[AnySource, AnySource]:
    """Return the training and the validation samples, both in the order of the source.

    Of each class, the sample with the lowest hash validates, and the one with the highest is trained on; with several
    labels a sample, of all samples. Lines of a list that repeat a path stay together.

    Args:
        source: the samples of both: labelled ones, or pairs.
        fraction: the share that validates, above 0 and below 1.

    Raises:
        UsageError: a class has only one sample; names it.
    """
    digests = (blake2b(os.fsencode(path), digest_size=8, key=_KEY).digest() for path in source.relative_paths())
    hashes = np.frombuffer(b"".join(digests), "<u8")
    one_each = getattr(source, "one_each", None)
    labels = np.zeros(len(hashes), np.int64) if one_each is None else one_each
    present, groups = np.unique(labels, return_inverse=True)
    lowest, highest = np.full(len(present), np.iinfo("u8").max, "u8"), np.zeros(len(present), "u8")
    np.minimum.at(lowest, groups, hashes)
    np.maximum.at(highest, groups, hashes)
    classes = classes_of(source) or ("all",)
    if alone := [classes[label] for label in present[lowest == highest].tolist()]:
        raise UsageError(
            f"{source} has one sample of {summarize(alone, show=repr)}, which cannot both train and validate: add "
            "samples, or give --val-data"
        )
    validates = ((hashes < int(fraction * 2**64)) | (hashes == lowest[groups])) & (hashes != highest[groups])
    return source.drop(np.flatnonzero(validates)), source.drop(np.flatnonzero(~validates))


_log = logging.getLogger(__name__)


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
