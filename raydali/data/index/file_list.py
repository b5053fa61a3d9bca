"""Files of a list with one `path,label` a line, for data that is not in class folders.

The lines are read by list_lines.py.
"""

import csv
import io
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.files import Files, absolute
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.list_lines import NUMBER, Lines, Wanted, read_lines, too_many
from raydali.data.index.shards import warn_of_renumbering
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import plural, summarize

ENDINGS = (".csv", ".tsv", ".txt")
"""Endings of a list's name, in any case; they distinguish it from a folder that does not exist locally."""
_CHECKED = 100
"""Files to check one by one if every listing lacks all files."""
_LISTING_THREADS = 32
_ABSENT = "nan", "<na>", "n/a", "#n/a"
"""The texts, in lower case, that pandas and spreadsheets write where there is no label."""
_FEW = 20
"""Fractions that may be classes, and missing class indices that are named."""

_log = logging.getLogger(__name__)


class FileList(LabeledFiles):
    """N files of a list, by id 0..N-1, in the order of its lines. Made by `from_file`."""

    @classmethod
    def from_file(
        cls,
        path: str,
        root: str | None = None,
        classes: Sequence[str] | None = None,
        *,
        label_column: str | None = None,
        multi_label: bool = False,
    ) -> Self:
        r"""Index the files of a list, and their classes.

            path,label
            cats/1.jpg,cat
            "dogs/big, brown.jpg",dog
            s3://bucket/3.jpg,cat

        Path and label are separated by a tab if the first line contains one, else by a comma, else by a semicolon if it
        is a header, or if its last word contains one. Otherwise the label follows the last space, and is a number or
        one word, as in Caffe's lists. A path that contains the separator is in double quotes, as in CSV. Spaces around
        a field or its quotes and empty lines are ignored. The text is UTF-8, with or without a byte order mark, and
        with any line ends.

        The first line is a header if its path is one word, with neither a dot nor a slash, no label is a number, and
        there is no such file. With `label_column` or `multi_label` a line may have more columns, and a path in a list
        with spaces as separators has none, or is quoted.

        Classes are the labels that occur, sorted: by value if all are numbers, else by name, like folders. So labels
        0..C-1 keep their values. Warns of other labels that look like numbers, and of files that are listed twice.

        Local files that do not exist are `missing`, found by listing each folder once; objects in stores are not
        checked.

        Args:
            path: of the list; local (`~` is expanded), or an `s3://` or `gs://` URI.
            root: the folder of relative paths, see `files.absolute`. Default: the folder of the list.
            classes: the allowed labels in order, for validation the labels of the training set. Default: any.
            label_column: name in the header or number from 1 after the path of the column with the labels; with
                `multi_label` several, separated by commas. Default: the only column, or all.
            multi_label: whether each column is a label of its own, with 0 or 1 in each line. Labels are then uint8
                (N, C), and the classes are the columns' names.

        Raises:
            UsageError: the list cannot be read or is empty; wrong lines, of which the first are named; a file with
                different labels; a label that stands for none, such as nan; none of the local files exists; columns
                that do not exist, or among which the label's is not chosen.
        """
        path = absolute(path)
        root = absolute(os.path.dirname(path) if root is None else root)
        columns = tuple(label_column.split(",")) if label_column else ()
        lines = read_lines(path, root, Wanted(tuple(classes or columns) if multi_label else columns, multi_label))
        labels, names = _targets(path, lines, warns=classes is None) if multi_label else _labels(path, lines, classes)
        missing, twice = _missing(lines, root)
        if not twice:
            lines.hashes = array("q")  # a fifth of the memory
        files = cls(*lines.paths.packed(), labels=labels, classes=names, missing=tuple(missing))
        if len(missing) == len(files):
            if len(lines.first) > 2:
                raise too_many(path, lines.first, is_header=False)
            raise UsageError(
                f"{path}: {plural(len(files), 'file')} cannot be found ({lines.shown(missing, files.path)}): "
                f"{_remedy(root, files.path(0).removeprefix(f'{root}/'), next(iter(lines.names), ''))}"
            )
        if twice:
            _require_one_label(path, lines, files)
            _log.warning("%s repeats files in %s", path, plural(twice, "line"))
        return files


def is_list(data: str) -> bool:
    """Return whether this names a list and not a folder: an existing file, or a name that ends like one."""
    local = os.path.expanduser(data)
    return os.path.isfile(local) or (data.lower().endswith(ENDINGS) and not os.path.isdir(local))


def column_texts(path: str, root: str | None, column: str) -> list[str]:
    """Return the text in a column of each line of a list; for the arguments and errors see `FileList.from_file`."""
    path = absolute(path)
    lines = read_lines(
        path, absolute(os.path.dirname(path) if root is None else root), Wanted((column,), option="--val-group")
    )
    names = [*lines.names]
    return [names[index] for index in lines.labels]


def _targets(path: str, lines: Lines, warns: bool) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The labels (N, C) of lines with several, and their names."""
    names = lines.columns.names if lines.columns else ()
    targets = np.array(lines.targets, np.uint8).reshape(-1, len(names))
    if warns and (same := np.flatnonzero((targets == targets[0]).all(0)).tolist()):
        shown = summarize((f"{targets[0, index]} for {names[index]!r}" for index in same), total=len(same))
        _log.warning("%s: all lines have %s, which cannot be learned", path, shown)
    return targets, names


def _labels(path: str, lines: Lines, classes: Sequence[str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The class of each line, and the classes."""
    absent = [place for name, place in lines.names.items() if name.lower() in _ABSENT]
    if absent and classes is None:
        without = np.flatnonzero(np.isin(np.frombuffer(lines.labels, np.int32), absent)).tolist()
        names = [*map(repr, lines.names)]
        raise UsageError(
            f"{path}: {len(without)} of {plural(len(lines.labels), 'line')} have no class "
            f"({lines.shown(without, lambda id: names[lines.labels[id]])}): give these lines one, or remove them"
        )
    allowed = tuple(classes) if classes is not None else _classes(path, {*lines.names}, len(lines.labels))
    places = {name: place for place, name in enumerate(allowed)}
    of_names = np.array([places.get(name, -1) for name in lines.names])
    if (of_names < 0).any():
        unknown = np.flatnonzero((of_names < 0)[np.frombuffer(lines.labels, np.int32)]).tolist()
        names = [*map(repr, lines.names)]
        shown = lines.shown(unknown, lambda id: names[lines.labels[id]])
        raise UsageError(
            f"{path}: labels in {len(unknown)} of {plural(len(lines.labels), 'line')} do not occur in the training "
            f"set ({shown}): correct or remove these lines"
        )
    return of_names[np.frombuffer(lines.labels, np.int32)], allowed


def _require_one_label(path: str, lines: Lines, files: LabeledFiles) -> None:
    """Refuse a file with different labels in its lines."""
    hashes = np.frombuffer(lines.hashes, np.int64)
    order = np.argsort(hashes, kind="stable")
    labels = files.labels[order].reshape(len(order), -1)
    pairs = np.flatnonzero((hashes[order][1:] == hashes[order][:-1]) & (labels[1:] != labels[:-1]).any(1))
    if len(pairs):
        first, second = order[pairs[order[pairs].argmin()] + np.arange(2)].tolist()

        def named(id: int) -> str:
            own = np.flatnonzero(files.labels[id]) if files.one_each is None else [files.labels[id]]
            return summarize((files.classes[label] for label in own), show=repr) or "no label"

        columns = ", or write a column for each label and give --multi-label" if files.one_each is not None else ""
        raise UsageError(
            f"{path} gives {files.path(first)} different labels ({lines.shown([first, second], named)}): remove one "
            f"line{columns}"
        )


def _remedy(root: str, first: str, label: str) -> str:
    """Say what is wrong with the first path, or which --root has this file, if one can be found nearby."""
    try:
        if (Path(root) / label).is_file():
            return f"{label} is a file, so that paths are in another column; write the path first in each line"
        if "\\" in first and Path(root, first.replace("\\", "/")).is_file():
            return f"{first} has backslashes, as on Windows; write slashes"
        if ending := next((end for end in (".jpg", ".png", ".jpeg") if Path(root, first + end).is_file()), None):
            return f"{first}{ending} exists; write paths with their endings"
        inside = sorted(entry for entry in Path(root).iterdir() if entry.is_dir())[:_CHECKED]
        folders = [Path.cwd(), *Path(root).parents[:2], *inside]
        there = next((folder for folder in folders if (folder / first).is_file()), None)
    except OSError:
        there = None
    if there is not None:
        return f"{first} is in {there}: give --root {there}"
    return f"relative paths begin at {root}; give --root to change that"


def _classes(path: str, labels: set[str], lines: int) -> tuple[str, ...]:
    """The labels in the order of their indices; warns if they look like indices, but are not."""
    numbers = {label: float(label) for label in labels if NUMBER.fullmatch(label)}
    if len(numbers) < len(labels):
        classes = tuple(sorted(labels))
        if numbers:
            _log.warning(
                "%s: labels mix numbers and words, such as %r and %r; all are names of %s in this order: %s",
                path,
                min(numbers),
                min(labels - numbers.keys()),
                plural(len(classes), "class"),
                summarize(classes, show=repr),
            )
        return classes
    classes = tuple(sorted(labels, key=lambda label: (numbers[label], label)))
    if len(labels) > max(_FEW, lines / 2) and any(value % 1 for value in numbers.values()):
        raise UsageError(
            f"{path} has {len(labels)} different labels in {plural(lines, 'line')}, fractions such as {classes[-1]!r}: "
            "give --label-column with a column of classes"
        )
    if len({*numbers.values()}) < len(labels):
        _log.warning("%s: labels such as '1' and '1.0' are equal numbers, but are different classes", path)
    few = {str(index) for index in range(len(classes) + _FEW)}
    lacking = [str(i) for i in range(int(classes[-1])) if str(i) not in labels] if "0" in labels <= few else []
    if lacking:
        order = plural(len(classes), "class"), summarize(classes, show=repr)
        _log.warning("%s: no line has the label %s, so that %s are in this order: %s", path, summarize(lacking), *order)
    elif classes != tuple(str(i) for i in range(len(classes))):
        warn_of_renumbering(path, classes)
    return classes


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
        for in_folder in threads.map(listed, lines.folders):
            places = np.minimum(np.searchsorted(hashes, in_folder), len(hashes) - 1)
            there[places[hashes[places] == in_folder]] = True
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


def listed_paths(path: str) -> Iterator[str]:
    """Yield the first field of each line, without a header, which is one word with neither a dot nor a slash."""
    try:
        text = storage.read(path).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {storage.reason(error)}; give a list of paths") from error
    if pointer := storage.why_pointer(os.fsencode(text)):
        raise UsageError(f"{path}: {pointer}")
    first = text.partition("\n")[0]
    separator = next((character for character in "\t," if character in first), None)
    if separator is None:  # a lone path may contain the others
        separator = ";" if ";" in first and ("." in first.partition(";")[0] or "." not in first) else ","
    for place, fields in enumerate(csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)):
        name = fields[0].strip() if fields else ""
        if name and (place or "." in name or "/" in name):
            yield name
