"""Lists the files in a tree of folders, on local disks, in `s3://` and in `gs://`.

An unreadable folder is an error, unless nothing in it would be read. Links are followed, except one to a folder above
itself, which would be walked some forty times: it is left out, with a warning.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raydali.data.sources import storage
from raydali.data.sources.file_rules import is_ignored
from raydali.errors import UsageError

Listing = dict[str, list[str]]
"""Names of files by folder relative to the root, "" for the root itself; unordered."""

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
            raise UsageError(f"{path!r} cannot be listed: {error.strerror}; make it readable or move it") from error
    return listing


def _list_objects(root: str) -> Listing:
    from pyarrow.fs import FileSelector, FileType

    base = root.partition("://")[2]
    try:
        found: Iterable[Any] = storage.file_system(root).get_file_info(FileSelector(base, recursive=True))
    except OSError as error:
        reason = storage.reason(error)
        raise UsageError(f"{root} cannot be listed: check name, credentials and endpoint: {reason}") from error

    listing: Listing = {"": []}
    for info in found:
        key = info.path[len(base) + 1 :]
        if info.type == FileType.Directory:
            listing.setdefault(key, [])
        else:
            folder, _, name = key.rpartition("/")
            listing.setdefault(folder, []).append(name)
    return listing
