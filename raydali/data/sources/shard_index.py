"""The index of the labelled images in a data set's shards: each shard is read once, and the index is cached.

tar.py and tfrecord.py define the samples of a shard and their labels.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.cache import cache_arrays, cached_arrays
from raydali.data.sources.files import digest
from raydali.data.sources.listing import FoundFile
from raydali.errors import UsageError
from raydali.text import plural, summarize

_VERSION = b"2"  # another one for another content of the cached file
_THREADS = 32
_LINE_SECONDS = 10.0

_log = logging.getLogger(__name__)

Label = int | str


class Member(NamedTuple):
    """A file in a shard: its name, and the position of its bytes."""

    name: bytes
    offset: int
    length: int


class Part(NamedTuple):
    """The images of a shard, by position, and their labels.

    Attributes:
        skipped: the number of other files that could be samples but are not read, by kind.
        unread: the number of bytes after the shard's end.
    """

    images: list[Member]
    labels: list[Label]
    skipped: Mapping[str, int] = {}
    unread: int = 0


@dataclass(frozen=True)
class ShardIndex:
    """The N samples of S shards, by shard, then by position.

    Attributes:
        counts: int64 (S,), the samples of each shard.
        names: uint8, names of the images in their shards, each ended by a NUL.
        offsets, lengths: int64 (N,), the position of an image in its shard, in bytes.
        labels: int64 (N,), indices into `label_names`.
        label_names: uint8, joined by NUL; sorted, numbers by value.
        numbered: bool (), whether the labels are numbers.
        skipped: uint8, the number of other files that could be samples but are not read, by kind, as JSON.
        unread: int64 (), bytes after the ends of shards.
    """

    counts: NDArray[np.int64]
    names: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_names: NDArray[np.uint8]
    numbered: NDArray[np.bool_]
    skipped: NDArray[np.uint8]
    unread: NDArray[np.int64]


def shard_index(
    root: str, shards: Sequence[FoundFile], read: Callable[[str, int], Part], *, kind: str, needed: str
) -> ShardIndex:
    """Index the samples of shards, or take them from the cache if no shard has changed its size or time since.

    Args:
        root: absolute, or an `s3://` or `gs://` URI.
        shards: below it.
        read: returns the samples of a shard, given its path and its size in bytes; raises ValueError for a broken one.
        kind: the kind of shards, which is the folder in the cache.
        needed: what messages ask for if there are no images.

    Raises:
        UsageError: broken shards, of which the first are named; numbers as well as names for labels; no images.
    """
    names = "\0".join(shard.name for shard in shards)
    place = f"{kind}/{digest(os.fsencode(root), os.fsencode(names))}.npz"
    times = np.array([shard[1:] for shard in shards], "<i8")
    stamp = digest(_VERSION, os.fsencode(names), times.data)
    index = _cached(place, stamp)
    if index is None:
        index = _joined(root, _parts(root, shards, read), needed)
        cache_arrays(place, stamp=np.array(stamp), **vars(index))
    return index


def _cached(place: str, stamp: str) -> ShardIndex | None:
    for held in cached_arrays(place):
        if str(held.pop("stamp", "")) == stamp:
            return ShardIndex(**held)
    return None


class _Packed(NamedTuple):
    """A `Part` in a few bytes per sample: there may be ten million."""

    names: bytes
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int32]
    label_values: list[Label]
    skipped: Mapping[str, int]
    unread: int


def _packed(part: Part) -> _Packed:
    values = list(dict.fromkeys(part.labels))
    places = {value: place for place, value in enumerate(values)}
    count = len(part.images)
    return _Packed(
        names=b"".join(image.name + b"\0" for image in part.images),
        offsets=np.fromiter((image.offset for image in part.images), np.int64, count),
        lengths=np.fromiter((image.length for image in part.images), np.int64, count),
        labels=np.fromiter((places[label] for label in part.labels), np.int32, count),
        label_values=values,
        skipped=part.skipped,
        unread=part.unread,
    )


def _parts(root: str, shards: Sequence[FoundFile], read: Callable[[str, int], Part]) -> list[_Packed]:
    if "://" in root:
        storage.file_system(root)  # opened once, before all threads need it
    with ThreadPoolExecutor(storage.CONNECTIONS if "://" in root else _THREADS) as threads:
        found = []
        told = time.monotonic()
        for part in threads.map(partial(_part_or_reason, root, read), shards):
            found.append(part)
            if time.monotonic() - told >= _LINE_SECONDS:
                told = time.monotonic()
                print(f"indexing {root}: {len(found)} of {plural(len(shards), 'shard')}", file=sys.stderr)
    if broken := [reason for reason in found if isinstance(reason, str)]:
        raise UsageError(
            f"{len(broken)} of {plural(len(shards), 'shard')} in {root} cannot be indexed "
            f"({summarize(broken, separator='; ')}): correct or remove them"
        )
    return [part for part in found if isinstance(part, _Packed)]


def _part_or_reason(root: str, read: Callable[[str, int], Part], shard: FoundFile) -> _Packed | str:
    path = f"{root}/{shard.name}"
    try:
        return _packed(read(path, shard.size))
    except OSError as error:
        return f"{path}: {storage.reason(error)}"
    except ValueError as error:
        return f"{path}: {error}"


def _joined(root: str, parts: Sequence[_Packed], needed: str) -> ShardIndex:
    values = {value for part in parts for value in part.label_values}
    numbers = {value for value in values if isinstance(value, int)}
    if numbers and numbers != values:
        number, name = next(iter(numbers)), next(iter(values - numbers))
        raise UsageError(f"{root} has both numbers and names as labels, such as {number} and {name!r}: unify them")
    if not values:
        raise UsageError(f"{root} has {plural(len(parts), 'shard')} without images: give {needed}")
    ordered: list[Any] = sorted(values)
    places = {value: place for place, value in enumerate(ordered)}
    labels = [np.array([places[value] for value in part.label_values], np.int64)[part.labels] for part in parts]
    return ShardIndex(
        counts=np.array([len(part.offsets) for part in parts]),
        names=_bytes(b"".join(part.names for part in parts)),
        offsets=np.concatenate([part.offsets for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        labels=np.concatenate(labels),
        label_names=_bytes(os.fsencode("\0".join(map(str, ordered)))),
        numbered=np.array(bool(numbers)),
        skipped=_bytes(json.dumps(sum((Counter(part.skipped) for part in parts), Counter())).encode()),
        unread=np.array(sum(part.unread for part in parts)),
    )


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
