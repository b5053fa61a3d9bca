"""Lists the files in a tree of folders, in one folder, or of a pattern; on local disks, in `s3://` and in `gs://`.

Patterns are as in WebDataset and TFRecord: `train-{000000..000146}.tar`, `train-*-of-1024`. In trees an unreadable
folder is an error, unless nothing in it would be read. Links are followed, except one to a folder above itself, which
would be walked some forty times: it is left out, with a warning.
"""

import errno
import fnmatch
import logging
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raydali.data.index.file_rules import LEFT_FILES, Listing, is_ignored
from raydali.data.index.files import LISTED, absolute
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import plural, summarize

_SPECIAL = re.compile(r"[{*?\[]")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")

_log = logging.getLogger(__name__)


def list_tree(root: str, *, of: str) -> Listing:
    """List all folders below a root, empty ones too, and their files.

    Args:
        root: from `files.absolute`. See `storage.file_system` for object stores.
        of: what the root should contain, for messages.

    Raises:
        UsageError: no such folder or bucket, or no right to read it.
    """
    return _list_objects(root) if "://" in root else _list_files(root, of)


def _list_files(root: str, of: str) -> Listing:
    if not os.path.isdir(root):
        there = next(filter(os.path.exists, (root, *map(str, Path(root).parents))))
        what = f"{root} does not exist" if os.path.isdir(there) else f"{there} is a file"
        raise UsageError(f"{what}: give a folder of {of}")
    listing: Listing = {}
    # Last: the real paths of the folder and of those whose links lead to it.
    pending: list[tuple[str, str, tuple[str, ...]]] = [("", root, (os.path.realpath(root),))]
    while pending:
        folder, path, reals = pending.pop()
        names = listing[folder] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    try:
                        is_folder = entry.is_dir()
                    except OSError:  # a link that cannot be followed counts as a file, as in os.walk
                        is_folder = False
                    if not is_folder:
                        names.append(entry.name)
                        continue
                    below: tuple[str, ...] = (f"{reals[0]}/{entry.name}", *reals[1:])
                    if entry.is_symlink():
                        below = (os.path.realpath(entry.path), *reals)
                        if any(os.path.commonpath([real, below[0]]) == below[0] for real in reals):
                            _log.warning("left out %r, which links to a parent, %r", entry.path, below[0])
                            continue
                    pending.append((f"{folder}/{entry.name}".lstrip("/"), entry.path, below))
        except OSError as error:
            if is_ignored(folder):  # a drive's lost+found is root's alone
                del listing[folder]
                continue
            why = storage.not_permitted(error) or error.strerror
            raise UsageError(f"{path!r} cannot be listed: {why}; make it readable or move it") from error
    return listing


def _list_objects(root: str) -> Listing:
    try:
        try:
            return _listing_of(root, storage.listed_by_obstore(root))
        except OSError:
            return _listing_of(root, storage.listed_by_arrow(root))
    except OSError as error:
        reason = storage.reason(error)
        raise UsageError(f"{root} cannot be listed: check name, credentials and endpoint: {reason}") from error


def _listing_of(root: str, objects: Iterator[storage.ListedObject]) -> Listing:
    """Return a listing, of which the versions are kept."""
    listing: Listing = {"": []}
    rows, begin = array("q"), len(root.partition("://")[2]) + 1
    for path, size, tag, is_file in objects:
        folder, _, name = path[begin:].rpartition("/")
        if is_file:
            rows.extend((hash(path), size, tag))
            listing.setdefault(folder, []).append(name)
        else:
            listing.setdefault(path[begin:], [])
    for folder in [*listing]:
        while folder := folder.rpartition("/")[0]:
            listing.setdefault(folder, [])
    LISTED.pop(root, None)
    LISTED[root] = rows
    return listing


class FoundFile(NamedTuple):
    """A file or a folder below a root: its relative path; of a file its size in bytes and its last change, in ns."""

    name: str
    size: int = 0
    written: int = 0
    is_folder: bool = False


def find_files(pattern: str) -> tuple[str, list[FoundFile]]:
    """Return a folder, and the files in or below it that match a pattern, each once.

    Args:
        pattern: `{08..11}` and `{a,b}` stand for names that must all exist; *, ? and [] match names of files. Local
            (`~` is expanded), or an `s3://` or `gs://` URI. The name of an existing local file is no pattern.

    Raises:
        UsageError: files that are missing, or a folder that cannot be listed.
    """
    special = None if os.path.isfile(os.path.expanduser(pattern)) else _SPECIAL.search(pattern)
    folder, _, rest = pattern[: special.start() if special else len(pattern)].rpartition("/")
    root = absolute(folder or "/" * pattern.startswith("/") or ".")
    names = [*_expanded(rest + pattern[special.start() :])] if special else [rest]

    files: dict[str, FoundFile] = {}
    missing = []
    listings: dict[str, dict[str, FoundFile]] = {}
    for path in names:
        folder, slash, name = path.rpartition("/")
        if folder not in listings:
            listings[folder] = _listing(f"{root}/{folder}".rstrip("/") or "/")
        there = listings[folder]
        matched = [name] if name in there else sorted(fnmatch.filter(there, name))
        files |= {folder + slash + file: there[file]._replace(name=folder + slash + file) for file in matched}
        if not matched:
            missing.append(path)
    if missing:
        raise UsageError(
            f"{len(missing)} of {plural(len(names), 'file')} {pattern} cannot be found in {root}: "
            f"{summarize(missing, show=repr)}; give those that exist"
        )
    return root, list(files.values())


def _expanded(pattern: str) -> Iterator[str]:
    """Expand `{08..11}` and `{a,b}`."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    low, high, words = match.groups()
    if words is None:
        digits = max(len(low), len(high)) if low.startswith("0") or high.startswith("0") else 0
        parts: Sequence[str] = [f"{number:0{digits}}" for number in range(int(low), int(high) + 1)]
    else:
        parts = words.split(",")
    for part in parts:
        yield from _expanded(pattern[: match.start()] + part + pattern[match.end() :])


def _listing(folder: str) -> dict[str, FoundFile]:
    try:
        return {file.name: file for file in folder_entries(folder) if not file.is_folder}
    except OSError as error:
        reason = storage.reason(error) if "://" in folder else storage.not_permitted(error) or error.strerror
        raise UsageError(f"{folder} cannot be listed: {reason}; give a folder that can be read") from error


def entries_or_none(folder: str) -> list[FoundFile]:
    """Return the `folder_entries` of a path or URI; none if it cannot be listed: reading it will raise the error."""
    try:
        return [*folder_entries(absolute(folder))]
    except (OSError, UsageError):
        return []


def folder_entries(folder: str) -> Iterator[FoundFile]:
    """Yield the files and folders in a folder, without those that `file_rules.is_ignored`.

    Args:
        folder: from `files.absolute`.

    Raises:
        OSError: it cannot be listed.
    """
    if "://" in folder:
        from pyarrow.fs import FileSelector, FileType

        try:
            infos = storage.file_system(folder).get_file_info(FileSelector(folder.partition("://")[2]))
        except OSError as error:
            if (missing := os.strerror(errno.ENOENT)) not in str(error):
                raise
            raise FileNotFoundError(errno.ENOENT, missing, folder) from error  # of Google's storage, it is no such one
        for info in infos:
            if info.type == FileType.Directory:
                if not is_ignored(info.base_name):
                    yield FoundFile(info.base_name, is_folder=True)
            elif not info.base_name.startswith(LEFT_FILES):
                yield FoundFile(info.base_name, info.size, info.mtime_ns or 0)
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # a link that cannot be followed, for example one to itself
                continue
            if is_folder:
                if not is_ignored(entry.name):
                    yield FoundFile(entry.name, is_folder=True)
            elif is_file and not entry.name.startswith(LEFT_FILES):
                stat = entry.stat()
                yield FoundFile(entry.name, stat.st_size, stat.st_mtime_ns)
