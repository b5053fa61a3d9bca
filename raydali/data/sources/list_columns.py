"""Finds the columns of a list that hold labels, by its first line, `--label-column` and `--multi-label`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from raydali.errors import UsageError
from raydali.text import plural, summarize

TARGETS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
"""Values of columns that are a label each."""
_COLUMNS_SHOWN = 4


@dataclass(frozen=True)
class Wanted:
    """The columns that the caller wants of a list.

    Attributes:
        columns: names of label columns in the header, or their numbers from 1 after the path; empty: all.
        several: whether each column is a label of its own, with 0 or 1 in each line.
    """

    columns: tuple[str, ...] = ()
    several: bool = False

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
            raise UsageError(f"{path} lacks the column {column!r}: it has {there}; give --label-column with one")
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
