"""Files of a list with one `path,label` a line, for data that is not in class folders.

The lines are read by list_lines.py.
"""

import logging
import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.files import Files, absolute
from raydali.data.sources.labeled import LabeledFiles, warn_of_renumbering
from raydali.data.sources.list_lines import NUMBER, Lines, read_lines
from raydali.errors import UsageError
from raydali.text import plural

ENDINGS = (".csv", ".tsv", ".txt")
"""Endings of a list's name, in any case; they distinguish it from a folder that does not exist locally."""
_CHECKED = 100
"""Files to check one by one if every listing lacks all files."""
_LISTING_THREADS = 32

_log = logging.getLogger(__name__)


class FileList(LabeledFiles):
    """N files of a list, by id 0..N-1, in the order of its lines. Made by `from_file`."""

    @classmethod
    def from_file(cls, path: str, root: str | None = None, classes: Sequence[str] | None = None) -> Self:
        r"""Index the files of a list, and their classes.

            path,label
            cats/1.jpg,cat
            "dogs/big, brown.jpg",dog
            s3://bucket/3.jpg,cat

        Path and label are separated by a tab if the first line contains one, else by a comma. If the first line has
        neither, the label follows the last space, and is a number or one word, as in Caffe's lists. A path that
        contains the separator is in double quotes, as in CSV. Spaces around a field or its quotes and empty lines are
        ignored. The text is UTF-8, with or without a byte order mark, and with any line ends.

        The first line is a header if its path is one word, with neither a dot nor a slash, its label is no number,
        and there is no such file.

        Classes are the labels that occur, sorted: by value if all are numbers, else by name, like folders. So labels
        0..C-1 keep their values. Warns of other labels that look like numbers, and of files that are listed twice.

        Local files that do not exist are `missing`, found by listing each folder once; objects in stores are not
        checked.

        Args:
            path: of the list; local (`~` is expanded), or an `s3://` or `gs://` URI.
            root: the folder of relative paths, see `files.absolute`. Default: the folder of the list.
            classes: the allowed labels in order, for validation those of the training set. Default: any.

        Raises:
            UsageError: the list cannot be read or is empty; wrong lines, of which the first are named; none of the
                local files exists.
        """
        path = absolute(path)
        root = absolute(os.path.dirname(path) if root is None else root)
        lines = read_lines(path, root)
        found = tuple(classes) if classes is not None else _classes(path, {*lines.names})
        places = {name: place for place, name in enumerate(found)}
        of_names = np.array([places.get(name, -1) for name in lines.names])
        if (of_names < 0).any():
            unknown = np.flatnonzero((of_names < 0)[np.frombuffer(lines.labels, np.int32)]).tolist()
            names = [*map(repr, lines.names)]
            shown = lines.shown(unknown, lambda id: names[lines.labels[id]])
            raise UsageError(
                f"{path}: labels in {len(unknown)} of {plural(len(lines.labels), 'line')} do not occur in the training "
                f"set ({shown}): correct or remove these lines"
            )
        missing, twice = _missing(lines, root)
        lines.hashes = array("q")  # a fifth of the memory
        labels = of_names[np.frombuffer(lines.labels, np.int32)]
        files = cls(*lines.paths.packed(), labels=labels, classes=found, missing=tuple(missing))
        if len(missing) == len(files):
            raise UsageError(
                f"{path}: {plural(len(files), 'file')} cannot be found ({lines.shown(missing, files.path)}): relative "
                f"paths begin at {root}; give --root to change that"
            )
        if twice:
            _log.warning("%s repeats files in %s", path, plural(twice, "line"))
        return files


def is_list(data: str) -> bool:
    """Return whether this names a list and not a folder: an existing file, or a name that ends like one."""
    local = os.path.expanduser(data)
    return os.path.isfile(local) or (data.lower().endswith(ENDINGS) and not os.path.isdir(local))


def _classes(path: str, labels: set[str]) -> tuple[str, ...]:
    numbers = [label for label in labels if NUMBER.fullmatch(label)]
    classes = sorted(labels, key=lambda label: (float(label), label)) if len(numbers) == len(labels) else sorted(labels)
    if numbers and classes != [str(i) for i in range(len(classes))]:
        warn_of_renumbering(path, classes)
    return tuple(classes)


def _missing(lines: Lines, root: str) -> tuple[list[int], int]:
    """Return the lines whose local file does not exist, and the number of lines that repeat a file.

    Listing a folder costs no more than checking a few of its files. Paths are compared by 64 bits of a hash.
    """
    hashes = np.frombuffer(lines.hashes, np.int64)
    order = np.argsort(hashes)
    hashes = hashes[order]
    new = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    there = np.zeros(len(order), np.bool_)

    def listed(folder: str) -> NDArray[np.int64]:
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                return np.array([hash(folder + entry.name) for entry in entries if _is_file(entry)], np.int64)
        except OSError:
            return np.zeros(0, np.int64)

    with ThreadPoolExecutor(_LISTING_THREADS) as threads:
        for found in threads.map(listed, lines.folders):
            places = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
            there[places[hashes[places] == found]] = True
    there = there[np.flatnonzero(new)[np.cumsum(new) - 1]] if not new.all() else there
    unseen, repeats = np.sort(order[~there]), int((~new).sum())
    if not len(unseen):
        return [], repeats
    numbers = np.frombuffer(lines.numbers, np.int32)
    unseen = unseen[~np.isin(numbers[unseen], np.frombuffer(lines.remote, np.int32))]
    # They may exist in folders that may be entered but not listed.
    files = Files(*lines.paths.packed())
    none = len(unseen) == len(order) and not any(os.path.isfile(files.path(id)) for id in unseen[:_CHECKED].tolist())
    missing = [id for id in unseen.tolist() if none or not os.path.isfile(files.path(id))]
    return missing, repeats


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that cannot be followed
        return False
