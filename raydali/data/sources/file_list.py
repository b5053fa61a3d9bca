"""Files of a list with one `path,label` a line, for data that is not in class folders.

A list may have ten million lines: it is read in parts, which are packed at once.
"""

import io
import logging
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.files import Files, PathPacker, absolute
from raydali.data.sources.labeled import LabeledFiles
from raydali.errors import UsageError
from raydali.text import summarize

ENDINGS = (".csv", ".tsv", ".txt")
"""Endings of a list's name, in any case, which tell it from a folder that does not exist locally."""
LINES_SHOWN = 3
_LETTERS_SHOWN = 60
_CHARACTERS_AT_ONCE = 1 << 18
_SOME = 100
_LISTING_THREADS = 32
_FIELD = {each: re.compile(rf' *"((?:[^"]|"")*)" *{each}|(?! *")([^{each}]*){each}') for each in ",\t"}
"""A field with its separator: quoted, or plain."""
_BEFORE_SPACES = re.compile(r'(?:"((?:[^"]|"")*)"|(.*\S))\s+([-+]?\d+(?:\.\d*)?|[\w+-]+)', re.DOTALL)
"""A path, quoted or plain, and after the last spaces a label, which is a number or one word."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)", re.ASCII)

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
        lines = _read(path, root)
        found = tuple(classes) if classes is not None else _classes(path, {*lines.names})
        places = {name: place for place, name in enumerate(found)}
        of_names = np.array([places.get(name, -1) for name in lines.names])
        if (of_names < 0).any():
            unknown = np.flatnonzero((of_names < 0)[np.frombuffer(lines.labels, np.int32)]).tolist()
            names = [*map(repr, lines.names)]
            shown = lines.shown(unknown, lambda id: names[lines.labels[id]])
            raise UsageError(
                f"{len(unknown)} of the {len(lines.labels)} lines of {path} have labels that are none of the "
                f"{len(found)} classes of the training set: {shown}: correct them, or leave these "
                f"lines out"
            )
        missing, twice = _missing(lines, root)
        lines.hashes = array("q")  # a fifth of the memory
        labels = of_names[np.frombuffer(lines.labels, np.int32)]
        files = cls(*lines.paths.packed(), labels=labels, classes=found, missing=tuple(missing))
        if len(missing) == len(files):
            raise UsageError(
                f"none of the {len(files)} files that {path} lists is there: {lines.shown(missing, files.path)}: "
                f"relative paths begin at {root}, or where --root says"
            )
        if twice:
            _log.warning("%s: lines that repeat a file: %d", path, twice)
        return files


def is_list(data: str) -> bool:
    """Whether this names a list and not a folder: an existing file, or a name that ends like one."""
    local = os.path.expanduser(data)
    return os.path.isfile(local) or (data.lower().endswith(ENDINGS) and not os.path.isdir(local))


@dataclass
class _Lines:
    """The contents of a list.

    Attributes:
        paths: those of the files.
        labels: for each line, an index into names.
        names: the labels that occur, and their indices.
        numbers: those of the lines, from 1.
        hashes: those of the paths as they are written.
        remote: numbers of the lines whose files are in object stores.
        folders: those of the other files, each with a slash at its end, or "".
    """

    paths: PathPacker
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    names: dict[str, int] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    hashes: "array[int]" = field(default_factory=lambda: array("q"))
    remote: "array[int]" = field(default_factory=lambda: array("i"))
    folders: set[str] = field(default_factory=set)

    def add(self, numbers: list[int], paths: list[str], labels: list[str], root_is_local: bool) -> None:
        """Add some lines; none of them if one is refused.

        Raises:
            UsageError: a path is refused.
        """
        self.paths.add(paths)
        for name in dict.fromkeys(labels):
            self.names.setdefault(name, len(self.names))
        self.labels.extend(map(self.names.__getitem__, labels))
        self.numbers.extend(numbers)
        self.hashes.extend(map(hash, paths))
        for number, path in zip(numbers, paths, strict=True):
            if "://" in path or not (root_is_local or path.startswith("/")):
                self.remote.append(number)
            else:
                self.folders.add(path[: path.rfind("/") + 1])

    def shown(self, ids: list[int], what: Callable[[int], str]) -> str:
        """Describe the first of some lines by number, with the text of `what` for each."""
        shown = [f"line {self.numbers[id]}: {what(id)}" for id in ids[:LINES_SHOWN]]
        return summarize(shown, LINES_SHOWN, total=len(ids), separator="; ")


def _read(path: str, root: str) -> _Lines:
    lines = _Lines(PathPacker(root))
    told, wrong = list[str](), 0
    count, separator, is_local = 0, "", "://" not in root
    for begin, texts in _parts(path):
        numbers, paths, labels = list[int](), list[str](), list[str]()
        reasons: dict[int, str] = {}
        for number, text in enumerate(texts, begin):
            line = text.rstrip("\n")
            if not line or line.isspace():
                continue
            first = not separator
            separator = separator or _separator(line)
            fields = _fields(line, separator)
            if isinstance(fields, str):
                reasons[number] = f"{_shortened(line)}: {fields}"
            elif not (first and _is_header(*fields, root)):
                numbers.append(number)
                paths.append(fields[0])
                labels.append(fields[1])
        count += len(reasons) + len(numbers)
        try:
            lines.add(numbers, paths, labels, is_local)
        except UsageError:
            reasons |= _refused(root, numbers, paths)
        wrong += len(reasons)
        told += [f"line {number}: {reasons[number]}" for number in sorted(reasons)[: LINES_SHOWN - len(told)]]
    if not count:
        raise UsageError(f"{path} lists no files: write a line path,label for each")
    if wrong:
        raise UsageError(
            f"{wrong} of the {count} lines of {path} are wrong: "
            f"{summarize(told, LINES_SHOWN, total=wrong, separator='; ')}: a line must read path,label"
        )
    return lines


def _parts(path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines in parts, each with the number of its first line."""
    number = 1
    try:
        # Names of files need not be UTF-8: such bytes pass through, as everywhere in Python.
        with io.TextIOWrapper(_opened(path), "utf-8-sig", "surrogateescape") as file:
            while part := file.readlines(_CHARACTERS_AT_ONCE):
                if "\0" in "".join(part):
                    raise UsageError(f"{path} is no list in UTF-8, it holds NUL bytes: save it as UTF-8 text")
                yield number, part
                number += len(part)
    except OSError as error:
        raise UsageError(f"cannot read the list {path}: {error.strerror or error}; give a file") from error


def _opened(path: str) -> IO[bytes]:
    return io.BytesIO(storage.read(path)) if "://" in path else Path(path).open("rb")


def _separator(line: str) -> str:
    if "\t" in line:
        return "\t"
    return " " if "," not in line and len(line.split()) > 1 else ","


def _fields(line: str, separator: str) -> tuple[str, str] | str:
    """Path and label, or what is wrong with the line.

    `csv.reader` would take all lines after a lost quote for one field. Given one line at a time it takes 1.5 us, where
    a line without quotes takes 0.45 us here, and it refuses spaces after a quote.
    """
    if separator == " ":
        match = _BEFORE_SPACES.fullmatch(line.strip())
        if match is None:
            return "no label behind a space" if '"' not in line else "its quotes do not match"
        quoted, plain, label = match.groups()
        return plain or quoted.replace('""', '"'), label
    if '"' not in line:
        fields = [field.strip() for field in line.split(separator)]
    else:
        fields, rest = [], line + separator
        while rest:
            match = _FIELD[separator].match(rest)
            if match is None:
                return "its quotes do not match"
            quoted, plain = match.groups()
            fields.append(plain.strip() if quoted is None else quoted.replace('""', '"'))
            rest = rest[match.end() :]
    if len(fields) > 2:
        return f"{len(fields)} fields (a path with a separator stands in double quotes)"
    return (fields[0], fields[1]) if len(fields) == 2 and all(fields) else "no label" if fields[0] else "no path"


def _is_header(path: str, label: str, root: str) -> bool:
    if "." in path or "/" in path or _NUMBER.fullmatch(label):
        return False
    try:
        Files.from_list(root, [path]).read(0)
    except (OSError, UsageError):
        return True
    return False


def _classes(path: str, labels: set[str]) -> tuple[str, ...]:
    numbers = [label for label in labels if _NUMBER.fullmatch(label)]
    classes = sorted(labels, key=lambda label: (float(label), label)) if len(numbers) == len(labels) else sorted(labels)
    if numbers and classes != [str(i) for i in range(len(classes))]:
        most, named = len(classes) - 1, summarize(classes, show=repr)
        _log.warning("%s: labels are not 0..%d: classes 0..%d are, in this order, %s", path, most, most, named)
    return tuple(classes)


def _missing(lines: _Lines, root: str) -> tuple[list[int], int]:
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
    none = len(unseen) == len(order) and not any(os.path.isfile(files.path(id)) for id in unseen[:_SOME].tolist())
    missing = [id for id in unseen.tolist() if none or not os.path.isfile(files.path(id))]
    return missing, repeats


def _is_file(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that cannot be followed
        return False


def _refused(root: str, numbers: list[int], paths: list[str]) -> dict[int, str]:
    """The reasons for refused paths, by line number."""
    wrong = {}
    for number, path in zip(numbers, paths, strict=True):
        try:
            PathPacker(root).add([path])
        except UsageError as error:
            wrong[number] = str(error)
    return wrong


def _shortened(line: str) -> str:
    return repr(line if len(line) <= _LETTERS_SHOWN else f"{line[:_LETTERS_SHOWN]}...")
