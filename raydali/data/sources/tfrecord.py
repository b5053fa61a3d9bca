"""Labelled images in TFRecord files: tfrecord_index.py finds images and labels, shards.py reads them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from raydali.data.sources.shards import Shards
from raydali.data.sources.tfrecord_index import tfrecord_index

_NAME = re.compile(r"\.tfrec|-of-[\d*?{},.\[\]!-]+$")


@dataclass(frozen=True, eq=False)
class TFRecords(Shards):
    """N images in S TFRecord files, by id 0..N-1; the name of one is its number in its file, from 0. Made by `scan`."""

    mark: ClassVar[str] = "#"
    first_labels: ClassVar[tuple[int, ...]] = (0, 1)

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None, *, labeled: bool = True) -> Self:
        """Index the images of some files.

        Classes are the labels that occur, sorted by value, so that the 1 to 1000 of ImageNet become 0 to 999. Warns if
        labels are not contiguous from 0 or 1, because class indices then differ from them.

        Args:
            data: a file or a pattern such as `train-*-of-01024` or `train-{00..99}.tfrecord`, where * matches only
                names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation those of the training set. Default: any.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: files are missing, cannot be read or hold no samples; see `tfrecord_index`. A label is not among
                the classes.
        """
        return cls._scan(data, data, classes, partial(tfrecord_index, labeled=labeled))


def names_tfrecords(data: str) -> bool:
    """Return whether this is the name or the pattern of TFRecord files, and not an existing folder."""
    return bool(_NAME.search(data.rpartition("/")[2])) and not os.path.isdir(os.path.expanduser(data))
