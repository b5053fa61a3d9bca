"""Samples to leave out, named by a list such as `raydali verify -o FILE` writes:

    # what begins so does not count
    /data/imagenet/train/n01440764/1.JPEG<TAB>image file is truncated
    n01440764/2.JPEG

A line is a path, as messages name it or relative to the data's root; behind a tab stands what is for people. Those
named leave the index before ids are given, so that each of the others comes exactly once.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from raydali.data import object_store
from raydali.data.files import Files, absolute
from raydali.data.image_pairs import ImagePairs
from raydali.errors import UsageError

_log = logging.getLogger(__name__)


class Index(Protocol):
    """A source that can be made smaller."""

    def __len__(self) -> int:
        """N."""
        ...

    def path(self, id: int) -> str:
        """Where a sample comes from."""
        ...

    def without(self, ids: Iterable[int]) -> Self:
        """An index of the others."""
        ...


AnyIndex = TypeVar("AnyIndex", bound=Index)


def exclude(file: str | None, *sources: AnyIndex) -> list[AnyIndex]:
    """The sources without what the file names; of a pair either image may be named.

    Lines that name nothing are warned about: what was broken may have been removed since.

    Args:
        file: local (`~` is expanded), or an `s3://` or `gs://` URI; None: nothing is left out.
        sources: training and validation samples, say.

    Raises:
        UsageError: the file cannot be read; it names nothing that there is; nothing would be left.
    """
    if file is None:
        return list(sources)
    named = read_list(file)
    matched, left = set[str](), []
    for source in sources:
        found = _found(source, named)
        matched.update(*found.values())
        out = list(found)
        if len(out) == len(source):
            raise UsageError(f"--exclude {file} names all {len(out)} samples of {source}: give another file")
        left.append(source.without(out) if out else source)
    if named and not matched:
        raise UsageError(f"--exclude {file} names none of the samples: paths must be those that `raydali verify` tells")
    if others := sorted(named - matched):
        _log.warning("%s: lines that name no sample, or none any more: %d, among them %s", file, len(others), others[0])
    return left


def read_list(file: str) -> set[str]:
    """The paths in such a file.

    Raises:
        UsageError: it cannot be read.
    """
    path = absolute(file)
    try:
        data = object_store.read(path) if "://" in path else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--exclude {file} cannot be read: {error.strerror or error}; give a file") from error
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    return {line.partition("\t")[0].rstrip("\r") for line in lines if line.strip() and not line.startswith("#")}


def _found(source: Any, named: set[str]) -> dict[int, set[str]]:
    """Those of the names that a source has, by the samples' ids."""
    if isinstance(source, ImagePairs):
        one, other = _found(source.inputs, named), _found(source.targets, named)
        return {id: one.get(id, set()) | other.get(id, set()) for id in one | other}
    prefix = os.path.join(source.root, "")
    wanted: dict[str, set[str]] = {}
    for name in named:
        for path in {name, name.removeprefix(prefix)}:
            wanted.setdefault(path, set()).add(name)
    paths: Iterable[str]
    if isinstance(source, Files):
        paths = os.fsdecode(source.packed_paths.tobytes()).split("\0")
    else:
        paths = (source.path(id).removeprefix(prefix) for id in range(len(source)))
    return {id: wanted[path] for id, path in enumerate(paths) if path in wanted}
