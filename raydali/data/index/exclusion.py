r"""Leaves out the samples in a list such as `raydali verify -o FILE` writes.

    # a comment
    /data/imagenet/train/n01440764/1.JPEG<TAB>image file is truncated
    n01440764/2.JPEG

A line is a path, as in messages or relative to the data's root; a reason may follow after a tab. A path with a line
break or a tab is in double quotes, with \n, \t, \r, \" and \\ as in Python. The samples leave the index before
ids are assigned, so that each of the others comes exactly once.
"""

import logging
import os
import re
from collections.abc import Iterable
from typing import Any, Protocol, Self, TypeVar

from raydali.data.index.files import Files, absolute
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.shards import Shards
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import plural, summarize

_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", '"': r"\"", "\\": r"\\"}
_MEANT = {escape[1]: character for character, escape in _ESCAPES.items()}
_ESCAPED = re.compile(r"[\n\t\r]")

_log = logging.getLogger(__name__)


class Index(Protocol):
    """A source from which samples can be dropped."""

    def __len__(self) -> int:
        """N."""

    def path(self, id: int) -> str:
        """The path of a sample."""

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these samples."""


AnyIndex = TypeVar("AnyIndex", bound=Index)


def exclude(file: str | None, *sources: AnyIndex) -> list[AnyIndex]:
    """Drop the samples that the file lists from the sources; of a pair either image may be listed.

    Warns of lines that match no sample: a broken file may have been removed since.

    Args:
        file: local (`~` is expanded), or an `s3://` or `gs://` URI; None: nothing is left out.
        sources: for example training and validation samples.

    Raises:
        UsageError: the file cannot be read; it matches no sample; no sample would be left; files that a source lists
            do not exist and are not excluded.
    """
    if file is None:
        _require_files(sources)
        return list(sources)
    named = read_list(file)
    matched, kept = set[str](), []
    for source in sources:
        names_by_id = _found(source, named)
        matched.update(*names_by_id.values())
        out = list(names_by_id)
        if len(out) == len(source):
            raise UsageError(f"--exclude {file} lists all {plural(len(out), 'sample')} of {source}: give another file")
        kept.append(source.drop(out) if out else source)
    if named and not matched:
        raise UsageError(f"--exclude {file} lists no sample of the data: give paths as `raydali verify` prints them")
    if others := sorted(named - matched):
        _log.warning("%s: skipped %s without a sample, such as %s", file, plural(len(others), "line"), others[0])
    _require_files(kept)
    return kept


def _require_files(sources: Iterable[Index]) -> None:
    for source in sources:
        if isinstance(source, Files) and source.missing:
            shown = summarize(map(source.path, source.missing), show=repr)
            raise UsageError(
                f"{len(source.missing)} of {plural(len(source), 'file')} of {source} cannot be found: {shown}; restore "
                f"them, or leave them out with --exclude FILE, which has a path in each line"
            )


def read_list(file: str) -> set[str]:
    """Read the paths in a list of exclusions.

    Raises:
        UsageError: it cannot be read.
    """
    path = absolute(file)
    try:
        data = storage.read(path)
    except OSError as error:
        raise UsageError(f"--exclude {file} cannot be read: {error.strerror or error}; give a file") from error
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    return {line.partition("\t")[0].rstrip("\r") for line in lines if line.strip() and not line.startswith("#")}


def as_line(path: str, reason: str) -> str:
    """Format a path of any bytes as a line of such a list."""
    if _ESCAPED.search(path) or path[:1] in ("#", '"') or not path.strip():
        path = '"' + re.sub(r'[\n\t\r"\\]', lambda match: _ESCAPES[match[0]], path) + '"'
    return f"{path}\t{reason}\n"


def _spelled(name: str) -> set[str]:
    """The paths that a line may mean: quotes may be part of the name."""
    if len(name) < 2 or not name.startswith('"') or not name.endswith('"'):
        return {name}
    return {name, re.sub(r"\\(.)", lambda match: _MEANT.get(match[1], match[0]), name[1:-1])}


def _found(source: Any, named: set[str]) -> dict[int, set[str]]:  # noqa: ANN401 (an Index; but for pairs it has a root)
    """The names that a source has, by sample id."""
    if isinstance(source, ImagePairs):
        parts = [_found(files, named) for files in (source.inputs, source.targets)]
        if any(" and " in name for name in named):  # both, as events and messages name a pair
            parts.append(_matching(map(source.path, range(len(source))), "", named))
        return {id: set[str]().union(*(part.get(id, ()) for part in parts)) for part in parts for id in part}
    prefix = os.path.join(source.root, "")
    if isinstance(source, Files | Shards):
        return _matching(source.relative_paths(), prefix, named)
    return _matching((source.path(id).removeprefix(prefix) for id in range(len(source))), prefix, named)


def _matching(paths: Iterable[str], prefix: str, named: set[str]) -> dict[int, set[str]]:
    """The names that match one of the paths below the prefix, by the paths' indices."""
    wanted: dict[str, set[str]] = {}
    for name in named:
        for meant in _spelled(name):
            for path in {meant, meant.removeprefix(prefix)}:
                wanted.setdefault(path, set()).add(name)
    return {id: wanted[path] for id, path in enumerate(paths) if path in wanted}
