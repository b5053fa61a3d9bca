"""Which labelled images tar shards hold and where: read once from their headers, then kept in the cache.

A sample is the members of one key, as in WebDataset: a name up to the first dot behind its last slash.

    n01440764/10026.jpg     key n01440764/10026, the image
    n01440764/10026.cls     its label

The label is, by the first of these that there is:

    .cls                    a whole number, 0 or more
    .json                   the number or the name under "label"
    the key's first folder  a name, as in class folders
    .txt                    a name

Other members do not count, and neither does a key without an image; how many of these there are is warned about.
"""

import json
import logging
import os
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydali.data import object_store
from raydali.data.cache import cache_folder
from raydali.data.files import digest
from raydali.data.image_folder import EXTENSIONS
from raydali.data.patterns import FoundFile
from raydali.data.tar_members import Member, members, open_archive
from raydali.errors import UsageError

_VERSION = b"1"  # another one for another content of the cached file
_THREADS = 32
_NAMED = 3
_IMAGES = frozenset(extension[1:].encode() for extension in EXTENSIONS)
_LABELS = frozenset((b"cls", b"json", b"txt"))

_log = logging.getLogger(__name__)

Label = int | str


@dataclass(frozen=True)
class TarIndex:
    """The N samples of S shards, by shard, then by place.

    Attributes:
        counts: int64 (S,), the samples of each shard.
        names: uint8, those of the images in their shards, each ended by a NUL.
        offsets, lengths: int64 (N,), where an image lies in its shard, in bytes.
        labels: int64 (N,), indices into `label_names`.
        label_names: uint8, joined by NUL; sorted, numbers by value.
        numbered: bool (), whether the labels are numbers.
        left_out: int64 (), keys with a label and no image.
    """

    counts: NDArray[np.int64]
    names: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_names: NDArray[np.uint8]
    numbered: NDArray[np.bool_]
    left_out: NDArray[np.int64]


class _Part(NamedTuple):
    images: list[Member]
    labels: list[Label]
    left_out: int


def tar_index(root: str, shards: Sequence[FoundFile]) -> TarIndex:
    """The samples of these shards, from the cache while no shard has another size or time than when it was written.

    Raises:
        UsageError: broken shards; samples with no label, with one that cannot be read, or with several images; labels
            of which some are numbers and some names; no images. Names the first of them.
    """
    names = "\0".join(shard.name for shard in shards)
    place = cache_folder() / "tar" / f"{digest(os.fsencode(root), os.fsencode(names))}.npz"
    times = np.array([shard[1:] for shard in shards], "<i8")
    stamp = digest(_VERSION, os.fsencode(names), times.data)
    index = _cached(place, stamp)
    if index is None:
        index = _read(root, shards)
        _keep(place, stamp, index)
    return index


def _cached(place: Path, stamp: str) -> TarIndex | None:
    try:
        with open(place, "rb") as file, np.load(file, allow_pickle=False) as held:
            if str(held["stamp"]) == stamp:
                return TarIndex(**{field.name: held[field.name] for field in fields(TarIndex)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # there is none, or no whole one
    return None


def _keep(place: Path, stamp: str, index: TarIndex) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place.parent) as temporary:
            made = Path(temporary, place.name)
            np.savez(made, stamp=np.array(stamp), **vars(index))
            os.replace(made, place)
    except OSError as error:
        _log.info("the index is not kept for the next run: cannot write %s: %s", place, error.strerror)


def _read(root: str, shards: Sequence[FoundFile]) -> TarIndex:
    if "://" in root:
        object_store.file_system(root)  # opened once, before all threads ask for it
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(partial(_part_or_reason, root), shards))
    if broken := [reason for reason in found if isinstance(reason, str)]:
        raise UsageError(f"{len(broken)} of the {len(shards)} shards in {root} cannot be indexed: {_first(broken)}")
    parts = [part for part in found if isinstance(part, _Part)]

    labels = [label for part in parts for label in part.labels]
    values = {*labels}
    numbers = {value for value in values if isinstance(value, int)}
    if numbers and numbers != values:
        number, name = next(iter(numbers)), next(iter(values - numbers))
        raise UsageError(f"{root}: some labels are numbers, such as {number}, and some names, such as {name!r}: unify")
    if not labels:
        raise UsageError(f"no images in the {len(shards)} shards in {root}: need {', '.join(EXTENSIONS)}")
    ordered: list[Any] = sorted(values)
    places = {value: place for place, value in enumerate(ordered)}
    images = [image for part in parts for image in part.images]
    return TarIndex(
        counts=np.array([len(part.images) for part in parts]),
        names=_bytes(b"".join(image.name + b"\0" for image in images)),
        offsets=_integers((image.offset for image in images), len(images)),
        lengths=_integers((image.length for image in images), len(images)),
        labels=_integers((places[label] for label in labels), len(images)),
        label_names=_bytes(os.fsencode("\0".join(map(str, ordered)))),
        numbered=np.array(bool(numbers)),
        left_out=np.array(sum(part.left_out for part in parts)),
    )


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _integers(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)


def _part_or_reason(root: str, shard: FoundFile) -> _Part | str:
    path = f"{root}/{shard.name}"
    try:
        return _part(path, shard.size)
    except OSError as error:
        return f"{path}: {object_store.reason(error)}"
    except ValueError as error:
        return f"{path}: {error}"


def _part(path: str, size: int) -> _Part:
    """The samples of a shard. Raises ValueError, which says what is wrong with it."""
    images: dict[bytes, Member] = {}
    dotted: dict[bytes, list[Member]] = {}  # a.1.jpg and a.seg.png: WebDataset calls both a's
    said: dict[bytes, dict[bytes, bytes]] = {}
    with open_archive(path, size) as read:
        for member in members(read, size):
            folder, slash, base = member.name.removeprefix(b"./").rpartition(b"/")
            stem, _, extension = base.partition(b".")
            if not stem or b"\0" in member.name:
                continue
            key, extension = folder + slash + stem, extension.lower()
            if extension in _IMAGES:
                if key in images:
                    raise ValueError(_several(key, [images[key], member]))
                images[key] = member
            elif extension in _LABELS:
                said.setdefault(key, {})[extension] = read(member.offset, member.length)
            elif extension.rpartition(b".")[2] in _IMAGES:
                dotted.setdefault(key, []).append(member)
    for key, others in dotted.items():
        if key not in images:
            if len(others) > 1:
                raise ValueError(_several(key, others))
            images[key] = others[0]

    in_order = sorted(images.items(), key=lambda item: item[1].offset)
    labels = [_label(key, said.get(key, {})) for key, _ in in_order]
    if none := [os.fsdecode(key) for (key, _), label in zip(in_order, labels, strict=True) if label is None]:
        raise ValueError(
            f"{len(none)} of {len(labels)} samples have no label: {_first(none)}: give each a .cls with a number, a "
            f'.json with a "label", or a key that begins with its class and a slash'
        )
    return _Part(
        [image for _, image in in_order],
        [label for label in labels if label is not None],
        len(said.keys() - images.keys()),
    )


def _several(key: bytes, images: list[Member]) -> str:
    names = " and ".join(os.fsdecode(image.name) for image in images[:2])
    return f"{os.fsdecode(key)} has several images, {names}: a key, up to the first dot, must have one"


def _label(key: bytes, said: dict[bytes, bytes]) -> Label | None:
    if b"cls" in said:
        return _number(key, "cls", said[b"cls"])
    if b"json" in said:
        try:
            held = json.loads(said[b"json"])
        except ValueError as error:
            raise ValueError(f"{os.fsdecode(key)}.json is no JSON: {error}") from error
        label = held.get("label") if isinstance(held, dict) else None
        if isinstance(label, int):
            return _number(key, "json", str(label).encode())
        if isinstance(label, str):
            return _name(key, "json", label)
    folder, slash, _ = key.partition(b"/")
    if slash:
        return os.fsdecode(folder)
    if b"txt" in said:
        return _name(key, "txt", os.fsdecode(said[b"txt"]).strip())
    return None


def _number(key: bytes, extension: str, text: bytes) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"{os.fsdecode(key)}.{extension} holds {text[:20]!r}: a label must be a whole number from 0")
    return int(text)


def _name(key: bytes, extension: str, text: str) -> str:
    if not text or "\n" in text or "\0" in text:
        raise ValueError(f"{os.fsdecode(key)}.{extension} holds {text[:20]!r}: a class's name must be one line")
    return text


def _first(reasons: list[str]) -> str:
    more = f" and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return "; ".join(reasons[:_NAMED]) + more
