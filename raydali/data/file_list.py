"""Files that a list names, one `path,label` a line: for data that does not lie in class folders."""

import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from raydali.data import object_store
from raydali.data.files import Files, absolute
from raydali.data.labeled_files import LabeledFiles
from raydali.errors import UsageError

ENDINGS = (".csv", ".tsv", ".txt")
"""Of a list's name, in any case: what tells it from a folder where it cannot be looked at."""
WRONG_LINES_SHOWN = 10
_LISTING_THREADS = 32
_FIELD = {each: re.compile(rf' *"((?:[^"]|"")*)" *{each}|(?! *")([^{each}]*){each}') for each in ",\t"}
"""With the separator behind it: what stands between quotes, or what stands there without any."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)", re.ASCII)

_log = logging.getLogger(__name__)

Lines = dict[int, tuple[str, str]]
"""Path and label by line number, from 1."""
Wrong = dict[int, str]
"""What is wrong with a line, by its number."""


class FileList(LabeledFiles):
    """N files of a list, by id 0..N-1, in the order of its lines. Made by `from_file`."""

    @classmethod
    def from_file(cls, path: str, root: str | None = None, classes: Sequence[str] | None = None) -> Self:
        r"""The files that a list names, and their classes.

            path,label
            cats/1.jpg,cat
            "dogs/big, brown.jpg",dog
            s3://bucket/3.jpg,cat

        Between path and label stands a comma, or a tab: a tab if the first line holds one. A path with a separator
        stands in double quotes, as in CSV. Spaces around a field or its quotes, and empty lines, do not count. The
        text is UTF-8, with or without a byte order mark, and lines end as on any system.

        The first line is a header if its path is one word, with neither a dot nor a slash, its label is no number,
        and there is no such file.

        Classes are the labels that occur, sorted: by value where all are numbers, else by name, as folders would be.
        So labels 0..C-1 stay what they are. Others that look like numbers are warned about, and so are files that
        are listed twice.

        Local files must exist, which is checked by listing each folder once; objects in stores are not looked at.

        Args:
            path: of the list; local (`~` is expanded), or an `s3://` or `gs://` URI.
            root: where relative paths lie, as `files.absolute` takes it. Default: the folder of the list.
            classes: what the labels may be, in order: for validation those of the training set. Default: any.

        Raises:
            UsageError: the list cannot be read, or lists nothing; wrong lines, of which the first ten are named.
        """
        path = absolute(path)
        root = absolute(os.path.dirname(path) if root is None else root)
        lines, wrong = _parse(path, root)
        wrong |= _unknown_labels(lines, classes) | _missing_files(lines, root) | _refused_paths(lines, root)
        if wrong:
            raise UsageError(_complaint(path, root, wrong, len(lines.keys() | wrong)))
        paths = [name for name, _ in lines.values()]
        found = tuple(classes) if classes is not None else _classes(path, {label for _, label in lines.values()})
        index = {name: i for i, name in enumerate(found)}
        labels = np.fromiter((index[label] for _, label in lines.values()), np.int64, len(lines))
        if twice := len(paths) - len(set(paths)):
            _log.warning("%s: lines that repeat a file: %d", path, twice)
        return cls.from_list(root, paths, labels=labels, classes=found)


def is_list(data: str) -> bool:
    """Whether this names a list and not a folder: a file, or what ends as the name of one."""
    local = os.path.expanduser(data)
    return os.path.isfile(local) or (data.lower().endswith(ENDINGS) and not os.path.isdir(local))


def _parse(path: str, root: str) -> tuple[Lines, Wrong]:
    lines: Lines = {}
    wrong: Wrong = {}
    separator = ""
    for number, line in _texts(path):
        first = not separator
        separator = separator or ("\t" if "\t" in line else ",")
        try:
            fields = _fields(line, separator)
        except ValueError as error:
            wrong[number] = str(error)
            continue
        if first and len(fields) == 2 and _is_header(fields[0], fields[1], root):
            continue
        if len(fields) == 2 and all(fields):
            lines[number] = fields[0], fields[1]
        elif len(fields) > 2:
            wrong[number] = f"{len(fields)} fields (a path with a separator stands in double quotes)"
        else:
            wrong[number] = "no path" if not fields[0] else "no label"
    if not lines and not wrong:
        raise UsageError(f"{path} lists no files: write a line path,label for each")
    return lines, wrong


def _texts(path: str) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, and their numbers."""
    try:
        data = object_store.read(path) if "://" in path else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the list {path}: {error.strerror or error}; give a file") from error
    if b"\0" in data:
        raise UsageError(f"{path} is no list in UTF-8, it holds NUL bytes: save it as UTF-8 text")
    # Names of files need not be UTF-8: such bytes pass through, as everywhere in Python.
    for number, line in enumerate(io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline=None), 1):
        if line.strip():
            yield number, line.rstrip("\n")


def _fields(line: str, separator: str) -> list[str]:
    """Those of a line. One line at a time, or a lost quote would swallow all that follow.

    Raises:
        ValueError: its quotes do not match.
    """
    if '"' not in line:
        return [field.strip() for field in line.split(separator)]
    fields, rest = [], line + separator
    while rest:
        match = _FIELD[separator].match(rest)
        if match is None:
            raise ValueError("its quotes do not match")
        quoted, plain = match.groups()
        fields.append(plain.strip() if quoted is None else quoted.replace('""', '"'))
        rest = rest[match.end() :]
    return fields


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
        shown = ", ".join(map(repr, classes[:3])) + ", ..." * (len(classes) > 3)
        _log.warning("%s: labels are not 0..%d: sorted, %s are", path, len(classes) - 1, shown)
    return tuple(classes)


def _unknown_labels(lines: Lines, classes: Sequence[str] | None) -> Wrong:
    if classes is None:
        return {}
    known = {*classes}
    what = f"is none of the {len(known)} classes of the training set"
    return {number: f"{label!r} {what}" for number, (_, label) in lines.items() if label not in known}


def _missing_files(lines: Lines, root: str) -> Wrong:
    """Lines whose local file is not there. A listing of a folder costs no more than looking for a few of its files."""
    folders: dict[str, dict[int, str]] = {}
    for number, (path, _) in lines.items():
        if "://" not in path and "\0" not in path and ("://" not in root or path.startswith("/")):
            folder, _, name = path.rpartition("/")
            folders.setdefault(folder or "/" * path.startswith("/"), {})[number] = name

    def missing(folder: str) -> list[int]:
        place = os.path.join(root, folder)
        try:
            with os.scandir(place) as entries:
                there = {entry.name for entry in entries if entry.is_file()}
        except OSError:
            there = set()
        # Those that a listing lacks may be there all the same: in folders that may be entered but not be listed.
        names = folders[folder].items()
        return [n for n, name in names if name not in there and not os.path.isfile(os.path.join(place, name))]

    with ThreadPoolExecutor(_LISTING_THREADS) as threads:
        numbers = [number for part in threads.map(missing, folders) for number in part]
    return {number: f"no such file: {lines[number][0]}" for number in numbers}


def _refused_paths(lines: Lines, root: str) -> Wrong:
    """The lines whose paths `Files.from_list` refuses: none where it takes all of them."""
    wrong: Wrong = {}
    with suppress(UsageError):
        Files.from_list(root, [path for path, _ in lines.values()])
        return wrong
    for number, (path, _) in lines.items():
        try:
            Files.from_list(root, [path])
        except UsageError as error:
            wrong[number] = str(error)
    return wrong


def _complaint(path: str, root: str, wrong: Wrong, lines: int) -> str:
    shown = "; ".join(f"line {number}: {wrong[number]}" for number in sorted(wrong)[:WRONG_LINES_SHOWN])
    more = f"; and {len(wrong) - WRONG_LINES_SHOWN} more" if len(wrong) > WRONG_LINES_SHOWN else ""
    return (
        f"{len(wrong)} of the {lines} lines of {path} are wrong: {shown}{more}: "
        f"a line must read path,label, and relative paths lie below {root}"
    )
