"""Files whose labels are unknown: those of a folder, or of a list."""

import csv
import io
import os
from collections.abc import Iterator

from raydali.data.sources import storage
from raydali.data.sources.files import Files, absolute
from raydali.data.sources.formats import source_kind
from raydali.data.sources.listing import list_tree
from raydali.data.sources.pointers import why_pointer
from raydali.data.sources.skipped_files import select_files
from raydali.errors import UsageError


def unlabeled_files(data: str, root: str | None, extensions: tuple[str, ...]) -> Files:
    """Index the files of a folder, sorted by folder and name, or of a list, in the order of its lines.

    Args:
        data: a folder, in which files lie at any depth, or a list with a path in each line, which other fields may
            follow, as in lists with labels; local (`~` is expanded), or an `s3://` or `gs://` URI.
        root: the folder of relative paths in a list; None: the list's.
        extensions: those of samples in folders, in lower case.

    Raises:
        UsageError: it cannot be read, or has no such files.
    """
    place = absolute(data)
    if source_kind(data) == "list":
        paths = [*_listed(place)]
        if not paths:
            raise UsageError(f"{data} is empty: give a list with a path in each line")
        return Files.from_list(absolute(root) if root is not None else place.rpartition("/")[0], paths)
    if root is not None:
        raise UsageError(f"--root {root} is only for lists, not for {data}: leave it out")
    listing, skipped = select_files(list_tree(place, of="samples"), extensions)
    skipped.warn(place, extensions)
    names = [(folder, sorted(listing[folder])) for folder in sorted(listing) if listing[folder]]
    if not names:
        raise UsageError(f"{data} has no samples: give files that end in {', '.join(extensions)}")
    return Files.from_folders(place, names)


def _listed(path: str) -> Iterator[str]:
    """Yield the first field of each line, without a header, which is one word with neither a dot nor a slash."""
    try:
        text = storage.read(path).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {storage.reason(error)}; give a list of paths") from error
    if pointer := why_pointer(os.fsencode(text)):
        raise UsageError(f"{path}: {pointer}")
    first = text.partition("\n")[0]
    separator = next((each for each in "\t," if each in first), None)
    if separator is None:  # a lone path may contain the others
        separator = ";" if ";" in first and ("." in first.partition(";")[0] or "." not in first) else ","
    for place, fields in enumerate(csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)):
        name = fields[0].strip() if fields else ""
        if name and (place or "." in name or "/" in name):
            yield name
