"""Labelled images in tar shards of WebDataset: tar_index.py finds images and labels, shards.py reads them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from raydali.data.sources.files import absolute
from raydali.data.sources.patterns import folder_entries
from raydali.data.sources.shards import Shards
from raydali.data.sources.tar_index import tar_index
from raydali.errors import UsageError

_ENDINGS = (".tar", ".tar.gz", ".tgz")  # the last two are refused with a reason


@dataclass(frozen=True, eq=False)
class TarShards(Shards):
    """N images in S tar archives, by id 0..N-1. Made by `scan`."""

    mark: ClassVar[str] = ":"

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None, *, labeled: bool = True) -> Self:
        """Index the images of some shards.

        Classes are the labels that occur, sorted: numbers by value, and names as class folders are. Warns if
        numeric labels are not contiguous from 0, because class indices then differ from them.

        Args:
            data: a folder of *.tar, or a pattern such as `shard-{000000..000146}.tar`, `{a,b}-0.tar` or `shard-*.tar`,
                where * matches only names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation those of the training set. Default: any.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: shards are missing, cannot be read or hold no samples; see `tar_index`. A label is not among
                the classes.
        """
        pattern = data if names_shards(data) else f"{data.rstrip('/')}/*.tar"
        return cls._scan(data, pattern, classes, partial(tar_index, labeled=labeled))


def holds_shards(folder: str) -> bool:
    """Return whether a folder holds *.tar and no folders.

    Archives next to class folders do not count: they are often what the folders were unpacked from.
    """
    try:
        entries = [*folder_entries(absolute(folder))]
    except (OSError, UsageError):  # reading it will raise the error
        return False
    return any(file.name.endswith(".tar") for file in entries if file is not None) and None not in entries


def names_shards(data: str) -> bool:
    """Return whether this is the name or the pattern of tar shards, and not an existing folder."""
    return data.lower().endswith(_ENDINGS) and not os.path.isdir(os.path.expanduser(data))
