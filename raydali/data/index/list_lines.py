"""Reads the lines of a list of files and labels, and finds its columns, as `FileList.from_file` describes.

A list may have ten million lines: it is read in parts, which are packed at once.
"""

import io
import os
import re
import shlex
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from raydali.data.index.files import Files, PathPacker, check_path
from raydali.data.read import storage
from raydali.data.read.storage import why_pointer
from raydali.errors import UsageError
from raydali.text import plural, summarize

TARGETS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
"""Values of columns that are a label each."""
_COLUMNS_SHOWN = 4
LINES_SHOWN = 3
_LETTERS_SHOWN = 60
_CHARACTERS_AT_ONCE = 1 << 18
_FIELD = {mark: re.compile(rf' *"((?:[^"]|"")*)" *{mark}|(?! *")([^{mark}]*){mark}') for mark in ",\t;"}
"""A field with its separator: quoted, or plain."""
_WORDS = re.compile(r'(?:"((?:[^"]|"")*)"|(\S+))\s+(.*)', re.DOTALL)
"""A path without spaces, or quoted, and columns after it."""
_BEFORE_SPACES = re.compile(r'(?:"((?:[^"]|"")*)"|(.*\S))\s+([-+]?\d+(?:\.\d*)?|[\w+-]+)', re.DOTALL)
"""A path, quoted or plain, and after the last spaces a label, which is a number or one word."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)", re.ASCII)
"""A label that is a number."""
_NO_NAME = re.compile(rf"{NUMBER.pattern}|.*\.(jpe?g|png)", re.ASCII | re.IGNORECASE)
"""A field that names no column: a number, or a file where the columns are in another order."""


@dataclass(frozen=True)
class Wanted:
    """The columns that the caller wants of a list.

    Attributes:
        columns: names of label columns in the header, or their numbers from 1 after the path; empty: all.
        several: whether each column is a label of its own, with 0 or 1 in each line.
        option: what the caller was given to name the columns.
    """

    columns: tuple[str, ...] = ()
    several: bool = False
    option: str = "--label-column"

    @property
    def by_default(self) -> bool:
        """True if there is one label, in the only column after the path."""
        return not self.columns and not self.several


@dataclass(frozen=True)
class Columns:
    """The label columns of a list.

    Attributes:
        width: number of fields in each line.
        chosen: indices of the fields with labels.
        names: names of these columns, from the header; empty if there is none.
        several: whether each is a label of its own, 0 or 1.
    """

    width: int
    chosen: tuple[int, ...]
    names: tuple[str, ...] = ()
    several: bool = False

    def labels(self, fields: Sequence[str]) -> list[str] | str:
        """Return the labels in these fields of a line, or what is wrong with them."""
        if len(fields) != self.width and not (len(fields) < self.width == 2):
            hint = " (put a path with a separator in double quotes)" if len(fields) > self.width else ""
            return f"{plural(len(fields), 'field')}, not {self.width}{hint}"
        if not fields[0]:
            return "no path"
        labels = [fields[index] for index in self.chosen] if len(fields) == self.width else []
        if not labels or not all(labels):
            return "no label"
        for label, name in zip(labels, self.names, strict=True) if self.several else ():
            if label not in TARGETS:
                return f"{label!r} in column {name!r} is not 0 or 1"
        return labels


@dataclass
class Lines:
    """The contents of a list.

    Attributes:
        paths: the paths of the files.
        first: the fields of the first line, if they may be more than two, separated by spaces.
        columns: the columns of the labels; None in an empty list.
        targets: for each line, 0 or 1 for each of several labels.
        labels: for each line, an index into names, if it has one label.
        names: the labels that occur, and their indices.
        numbers: the numbers of the lines, from 1.
        hashes: the hashes of the paths as they are written.
        remote: numbers of the lines whose files are in object stores.
        folders: the folders of the other files, each with a slash at its end, or "".
    """

    paths: PathPacker
    first: list[str] = field(default_factory=list)
    columns: Columns | None = None
    targets: bytearray = field(default_factory=bytearray)
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    names: dict[str, int] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    hashes: "array[int]" = field(default_factory=lambda: array("q"))
    remote: "array[int]" = field(default_factory=lambda: array("i"))
    folders: set[str] = field(default_factory=set)

    def add(self, numbers: list[int], paths: list[str], labels: list[str], root_is_local: bool) -> None:
        """Add some lines, whose paths `check_path` accepts."""
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


def read_lines(path: str, root: str, wanted: Wanted | None = None) -> Lines:
    """Read the lines of a list.

    Args:
        path: of the list, absolute, or an `s3://` or `gs://` URI.
        root: the folder of relative paths.
        wanted: which columns hold labels.

    Raises:
        UsageError: the list cannot be read or is empty; wrong lines, of which the first are named; see `label_columns`.
    """
    wanted = wanted or Wanted()
    lines = Lines(PathPacker(root))
    shown, wrong = list[str](), 0
    count, separator, is_local = 0, "", "://" not in root
    for begin, texts in _parts(path):
        numbers, paths, labels, targets = list[int](), list[str](), list[str](), bytearray()
        reasons: dict[int, str] = {}
        for number, text in enumerate(texts, begin):
            line = text.rstrip("\n")
            if not line or line.isspace():
                continue
            first = not separator
            separator = separator or _separator(line)
            fields = _fields(line, separator, wanted)
            if isinstance(fields, str):
                reasons[number] = f"{_shortened(line)}: {fields}"
                continue
            if lines.columns is None and len(fields) > 1:
                is_header = first and _is_header(fields[0], fields[1:], root)
                lines.columns = label_columns(path, fields, is_header, wanted)
                if separator == " " and '"' not in line:
                    lines.first = line.split()
                if is_header:
                    continue
            of_line = lines.columns.labels(fields) if lines.columns else "no label" if fields[0] else "no path"
            if isinstance(of_line, str):
                reasons[number] = f"{_shortened(line)}: {of_line}"
                continue
            if not is_local or "://" in fields[0]:
                try:
                    check_path(root, fields[0])
                except UsageError as error:
                    reasons[number] = str(error)
                    continue
            numbers.append(number)
            paths.append(fields[0])
            if wanted.several:
                targets += bytes(map(TARGETS.__getitem__, of_line))
            else:
                labels += of_line
        count += len(reasons) + len(numbers)
        lines.add(numbers, paths, labels, is_local)
        lines.targets += targets
        wrong += len(reasons)
        shown += [f"line {number}: {reasons[number]}" for number in sorted(reasons)[: LINES_SHOWN - len(shown)]]
    if not count:
        raise UsageError(f"{path} lists no files: write a line path,label for each file")
    if wrong:
        raise UsageError(
            f"{path}: {wrong} of {plural(count, 'line')} cannot be read "
            f"({summarize(shown, LINES_SHOWN, total=wrong, separator='; ')}): write lines path,label, path;label "
            "or with a tab"
        )
    return lines


def _parts(path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines in parts, each with the number of its first line."""
    number = 1
    try:
        # Names of files need not be UTF-8: such bytes pass through, as everywhere in Python.
        with io.TextIOWrapper(_opened(path), "utf-8-sig", "surrogateescape") as file:
            while part := file.readlines(_CHARACTERS_AT_ONCE):
                if number == 1 and (pointer := why_pointer(os.fsencode(part[0]))):
                    raise UsageError(f"{path}: {pointer}")
                if "\0" in "".join(part):
                    raise UsageError(f"{path} is not UTF-8 text, since it has NUL bytes: save it as UTF-8 text")
                yield number, part
                number += len(part)
    except OSError as error:
        raise UsageError(f"the list {path} cannot be read: {error.strerror or error}; give another one") from error


def _opened(path: str) -> IO[bytes]:
    return io.BytesIO(storage.read(path)) if "://" in path else Path(path).open("rb")


def _separator(line: str) -> str:
    """The separator of a list's fields, by its first line."""
    if "\t" in line:
        return "\t"
    if "," in line:
        return ","
    words = line.split()
    if ";" in words[-1] or (";" in line and "." not in line):  # else it is part of a path in a list with spaces
        return ";"
    return " " if len(words) > 1 else ","


def _fields(line: str, separator: str, wanted: Wanted) -> list[str] | str:
    """The path and the columns after it, or what is wrong with the line.

    `csv.reader` would take all lines after a lost quote for one field. Given one line at a time it takes 1.5 us, where
    a line without quotes takes 0.45 us here, and it refuses spaces after a quote.
    """
    if separator == " ":
        match = (_BEFORE_SPACES if wanted.by_default else _WORDS).fullmatch(line.strip())
        if match is None:
            return "no label after a space" if '"' not in line else "its quotes do not match"
        quoted, plain, after = match.groups()
        return [plain or quoted.replace('""', '"'), *([after] if wanted.by_default else after.split())]
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
    return fields


def _is_header(path: str, labels: list[str], root: str) -> bool:
    if "." in path or "/" in path or not all(labels) or any(map(_NO_NAME.fullmatch, labels)):
        return False
    try:
        Files.from_list(root, [path]).read(0)
    except (OSError, UsageError):
        return True
    return False


def _shortened(line: str) -> str:
    return repr(line if len(line) <= _LETTERS_SHOWN else f"{line[:_LETTERS_SHOWN]}...")


def label_columns(path: str, fields: Sequence[str], is_header: bool, wanted: Wanted) -> Columns:
    """Find the label columns by the fields of the first line.

    Raises:
        UsageError: a wanted column does not exist; several columns for one label; labels without names.
    """
    names, numbers = fields[1:] if is_header else [], range(1, len(fields))
    chosen = [
        names.index(column) + 1 if column in names else int(column) if column.isdecimal() else 0
        for column in wanted.columns
    ] or [*numbers]
    for column, index in zip(wanted.columns, chosen, strict=False):
        if index not in numbers:
            there = _shown(fields, is_header) if names else f"{plural(len(numbers), 'column')} and no header"
            raise UsageError(f"{path} lacks the column {column!r}: it has {there}; give {wanted.option} with one")
    if wanted.several and not names:
        raise UsageError(f"{path} has no header: write a first line such as path,cat,dog, which --multi-label needs")
    if len({fields[index] for index in chosen}) < len(chosen) and wanted.several:
        raise UsageError(f"{path} has a column twice ({summarize(names, len(names), show=repr)}): rename one")
    if len(chosen) > 1 and not wanted.several:
        raise too_many(path, fields, is_header)
    of_chosen = tuple(names[index - 1] for index in chosen) if names else ()
    return Columns(len(fields), tuple(chosen), of_chosen, wanted.several)


def too_many(path: str, fields: Sequence[str], is_header: bool) -> UsageError:
    """Return the error for a list with several columns, of which none, or more than one, was chosen for the label."""
    names = [shlex.quote(name) if is_header else f"{number}" for number, name in enumerate(fields[1:], 1)]
    choices = " or ".join(f"--label-column {name}" for name in names[:_COLUMNS_SHOWN])
    return UsageError(
        f"{path} has {len(names)} columns after the path, {_shown(fields, is_header)}: give the labels' column by "
        f"{choices}"
    )


def _shown(fields: Sequence[str], is_header: bool) -> str:
    of_line = enumerate(fields[1:], 1)
    shown = [f"{name!r}" if is_header else f"column {number} with {name!r}" for number, name in of_line]
    return summarize(shown, _COLUMNS_SHOWN)
