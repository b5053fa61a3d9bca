"""Labelled images in tar shards of WebDataset: their index is read once from the headers of members, and cached.

A sample consists of the members with one key, as in WebDataset: the name up to the first dot after the last slash.

    n01440764/10026.jpg     key n01440764/10026, the image
    n01440764/10026.cls     its label

The label is the first of these that exists:

    .cls                    a whole number, 0 or more
    .json                   the number or the name under "label"
    the key's first folder  a name, as in class folders; the second, if all keys begin with one such as train/
    .txt                    a name

Other members of a key are ignored, and so are keys without an image, with a warning that counts them. A link counts as
its target. Members of hidden folders, such as .ipynb_checkpoints, and of folders that other systems leave behind, are
ignored.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import numpy as np

from raydali.data.index.file_rules import LEFT, LEFT_BEHIND, kind_of
from raydali.data.index.labeled import IMAGE_EXTENSIONS
from raydali.data.index.listing import entries_or_none, find_files
from raydali.data.index.shard_index import Label, Member, Part, ShardIndex, shard_index
from raydali.data.index.shards import Shards
from raydali.data.index.tar_headers import members
from raydali.data.read.file_parts import read_ahead
from raydali.errors import UsageError
from raydali.text import plural, summarize

_IMAGES = frozenset(extension[1:].encode() for extension in IMAGE_EXTENSIONS)
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))
_LABELS = frozenset((b"cls", b"json", b"txt"))
_HIDDEN = re.compile(rb"(^|/)\.(?!\.?(/|$))")
_LEFT_FOLDER = re.compile(LEFT_BEHIND.encode(), re.IGNORECASE)


def _in_split(shard: str, index: ShardIndex) -> ShardIndex:
    """The index by the class folders in train/ or another split, if all images are in such folders."""
    first = index.names_of_labels
    if index.numbered or not {*map(str.lower, first)} <= _SPLITS:
        return index
    paths = [name.removeprefix("./").split("/") for name in os.fsdecode(index.names[:-1].tobytes()).split("\0")]
    if any(len(path) < 3 or path[0] not in first for path in paths):
        return index
    if len(first) > 1:
        raise UsageError(
            f"{shard} has class folders in {summarize(first)}: pack each into an archive of its own, and give them as "
            "--data and --val-data"
        )
    classes, labels = np.unique([path[1] for path in paths], return_inverse=True)
    return index.with_labels(labels, classes)


def _part(path: str, size: int, *, labeled: bool = True) -> Part:
    """Index the samples of a shard. Raises ValueError for a broken one."""
    images: dict[bytes, Member] = {}
    dotted: dict[bytes, list[Member]] = {}  # a.1.jpg and a.seg.png: WebDataset calls both a's
    beside: dict[bytes, dict[bytes, bytes]] = {}
    others: dict[bytes, str] = {}  # kinds of files, by key
    skipped: Counter[str] = Counter()
    unread: list[int] = []
    read = read_ahead(path, size)
    for member in members(read, size, unread.append):
        folder, slash, base = member.name.removeprefix(b"./").rpartition(b"/")
        stem, _, extension = base.partition(b".")
        if not stem or b"\0" in member.name:
            continue
        key, extension = folder + slash + stem, extension.lower()
        is_image = extension.rpartition(b".")[2] in _IMAGES
        if _HIDDEN.search(folder):
            skipped["in hidden folders"] += is_image
        elif _LEFT_FOLDER.search(folder):
            skipped[LEFT] += is_image
        elif member.offset < 0:
            skipped["linked to no file in their archive"] += is_image
        elif extension in _IMAGES:
            if key in images:
                raise ValueError(_several(key, [images[key], member]))
            images[key] = member
        elif extension in _LABELS:
            beside.setdefault(key, {})[extension] = read(member.offset, member.length)
        elif is_image:
            dotted.setdefault(key, []).append(member)
        elif (kind := kind_of(os.fsdecode(base))) is not None:
            others[key] = kind
    for key, several in dotted.items():
        if key not in images:
            if len(several) > 1:
                raise ValueError(_several(key, several))
            images[key] = several[0]

    in_order = sorted(images.items(), key=lambda item: item[1].offset)
    labels = [_label(key, beside.get(key, {})) if labeled else 0 for key, _ in in_order]
    if none := [os.fsdecode(key) for (key, _), label in zip(in_order, labels, strict=True) if label is None]:
        raise ValueError(
            f"{len(none)} of {plural(len(labels), 'sample')} cannot be labelled: {summarize(none, separator='; ')}: "
            f'give each a .cls number, a .json "label", or a key CLASS/NAME'
        )
    skipped.update(kind for key, kind in others.items() if key not in images)
    unmatched = (os.fsdecode(key.rpartition(b"/")[2]) for key in beside.keys() - images.keys() - others.keys())
    skipped["with a label but no image"] += sum(kind_of(stem) is not None for stem in unmatched)  # README.txt is none
    labels_found = [label for label in labels if label is not None]
    return Part.of([image for _, image in in_order], labels_found, +skipped, sum(unread))


def _several(key: bytes, images: list[Member]) -> str:
    names = " and ".join(os.fsdecode(image.name) for image in images[:2])
    return f"{os.fsdecode(key)} has several images, {names}: a key, up to the first dot, must have one"


def _label(key: bytes, beside: dict[bytes, bytes]) -> Label | None:
    if b"cls" in beside:
        return _number(key, "cls", beside[b"cls"])
    if b"json" in beside:
        try:
            held = json.loads(beside[b"json"])
        except ValueError as error:
            raise ValueError(f"{os.fsdecode(key)}.json is not JSON: {error}") from error
        label = held.get("label") if isinstance(held, dict) else None
        if isinstance(label, int):
            return _number(key, "json", str(label).encode())
        if isinstance(label, str):
            return _name(key, "json", label)
    folder, slash, _ = key.partition(b"/")
    if slash:
        return os.fsdecode(folder)
    if b"txt" in beside:
        return _name(key, "txt", os.fsdecode(beside[b"txt"]).strip())
    return None


def _number(key: bytes, extension: str, text: bytes) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"{os.fsdecode(key)}.{extension} must be a whole number from 0, not {text[:20]!r}")
    return int(text)


def _name(key: bytes, extension: str, text: str) -> str:
    if not text or "\n" in text or "\0" in text:
        raise ValueError(f"{os.fsdecode(key)}.{extension} must be a class name of one line, not {text[:20]!r}")
    return text


_ENDINGS = (".tar", ".tar.gz", ".tgz")  # the last two are refused with a reason


@dataclass(frozen=True, eq=False)
class TarShards(Shards):
    """N images in S tar archives, by id 0..N-1. Made by `scan`."""

    mark: ClassVar[str] = ":"

    @classmethod
    def scan(cls, data: str, classes: Sequence[str] | None = None, *, labeled: bool = True) -> Self:
        """Index the images of some shards, see `Shards.of_index`.

        Args:
            data: a folder of *.tar, or a pattern such as `shard-{000000..000146}.tar`, `{a,b}-0.tar` or `shard-*.tar`,
                where * matches only names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation the labels of the training set. Default: any.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: shards that are missing or broken; samples without a label, with an invalid one, or with several
                images; numbers as well as names for labels; no images. Names the first of them. Trees of several
                splits. A label is not among the classes.
        """
        root, shards = find_files(data if names_shards(data) else f"{data.rstrip('/')}/*.tar")
        kind, read = "tar-2" if labeled else "tar-unlabeled-2", partial(_part, labeled=labeled)
        index = shard_index(root, shards, read, kind=kind, needed=", ".join(IMAGE_EXTENSIONS))
        if labeled:
            index = _in_split(f"{root}/{shards[0].name}", index)
        return cls.of_index(data, root, shards, index, classes)


def holds_shards(folder: str) -> bool:
    """Return whether a folder holds *.tar and no folders.

    Archives next to class folders do not count: they are often what the folders were unpacked from.
    """
    entries = entries_or_none(folder)
    return any(entry.name.endswith(".tar") for entry in entries) and not any(entry.is_folder for entry in entries)


def names_shards(data: str) -> bool:
    """Return whether this is the name or the pattern of tar shards, and not an existing folder."""
    return data.lower().endswith(_ENDINGS) and not os.path.isdir(os.path.expanduser(data))
