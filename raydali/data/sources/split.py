"""Splits validation samples off, by a hash of each path: the same on every machine, at any root and for any seed.

A sample validates if its hash is below a share of all hashes. So further samples do not move others; only the two with
the lowest and the highest hash of a class have fixed places, so that each class is on both sides.
"""

import os
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from raydali.data.sources.labeled import LabeledSource
from raydali.errors import UsageError
from raydali.text import summarize

DEFAULT_FRACTION = 0.1
_KEY = b"raydali validation samples"  # to change it would move samples of runs that are resumed

AnyLabeled = TypeVar("AnyLabeled", bound=LabeledSource)


def split(source: AnyLabeled, fraction: float) -> tuple[AnyLabeled, AnyLabeled]:
    """Return the training and the validation samples, both in the order of the source.

    Of each class, the sample with the lowest hash validates, and the one with the highest is trained on; with several
    labels a sample, of all samples. Lines of a list that repeat a path stay together.

    Args:
        source: the samples of both.
        fraction: the share that validates, above 0 and below 1.

    Raises:
        UsageError: a class has only one sample; names it.
    """
    digests = (blake2b(os.fsencode(path), digest_size=8, key=_KEY).digest() for path in source.relative_paths())
    hashes = np.frombuffer(b"".join(digests), "<u8")
    labels = np.zeros(len(hashes), np.int64) if source.one_each is None else source.one_each
    present, groups = np.unique(labels, return_inverse=True)
    lowest, highest = np.full(len(present), np.iinfo("u8").max, "u8"), np.zeros(len(present), "u8")
    np.minimum.at(lowest, groups, hashes)
    np.maximum.at(highest, groups, hashes)
    if alone := [source.classes[label] for label in present[lowest == highest].tolist()]:
        raise UsageError(
            f"{source} has one sample of {summarize(alone, show=repr)}, which cannot both train and validate: add "
            "samples, or give --val-data"
        )
    validates = ((hashes < int(fraction * 2**64)) | (hashes == lowest[groups])) & (hashes != highest[groups])
    return source.drop(np.flatnonzero(validates)), source.drop(np.flatnonzero(~validates))
