"""Copies of images in shards, tar archives or Parquet files: code of `raydali prepare` that runs in worker processes.

    ids of a shard --> read, copied --> a temporary file, hashed --> renamed or uploaded --> its record, .NAME.json

A shard is complete when its record exists, and sound while it has the size and the hash in there. Its samples are
consecutive ids of the source, so that images of the shards have the same ids.
"""

import hashlib
import io
import json
import logging
import os
import tarfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from raydali.commands.image_copies import Written, copy_of, origin, partial_path, size_and_time, write_file, writing
from raydali.data.loading.quarantine import BrokenSample, why_broken
from raydali.data.sources.file_rules import is_ignored
from raydali.data.sources.files import digest
from raydali.data.sources.labeled import IMAGE_EXTENSIONS, LabeledSource
from raydali.data.sources.parquet import IMAGE, LABEL
from raydali.data.sources.shards import Shards
from raydali.data.sources.storage import file_system, modified_ns, read, reason
from raydali.data.tasks.decoder_choice import HEAD, format_of
from raydali.errors import DataError, UsageError
from raydali.text import summarize

ROWS = 100
"""Number of rows in a row group of Parquet, as in data sets of Hugging Face."""
_SAMPLED = 64
"""Number of images from which the mean size of the copies is estimated."""
_READ_AT_ONCE, _READERS = 32, 16
_BUFFER = 1 << 20  # bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Split:
    """Images that are copied together, and their names in the target.

    Attributes:
        name: such as train; empty if the data has no splits.
        source: the images; without labels if they keep their paths.
        folders: those of the classes, or all of images that keep their paths; empty: labels are numbers.
        numbers: the number of each class, which stands for it then.
        ending: of names that have none in the source; empty: images keep their paths.
        shard_images: number of samples in a shard.
    """

    name: str
    source: Any
    folders: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    ending: str = ""
    shard_images: int = 0

    def target_folders(self, target: str, to: str) -> list[str]:
        """Return the folders to be made in the target."""
        root = f"{target}/{self.name}".rstrip("/")
        if to == "folder":
            return [f"{root}/{folder}" for folder in self.folders]
        return [root] * ("://" not in target)

    def name_of(self, id: int) -> tuple[str, str]:
        """Return the name of an image without its folder, before and after its last dot; the latter begins with it."""
        name = self.source.path(id)
        if isinstance(self.source, Shards):
            name = name.removeprefix(self.source.shard(id) + self.source.mark)
        stem, ending = os.path.splitext(os.path.basename(name))  # noqa: PTH119, PTH122 (it may be a URI)
        return (stem, ending) if ending.lower() in IMAGE_EXTENSIONS else (stem + ending, self.ending)

    def place_of(self, target: str, id: int) -> str:
        """Return the path of a copy in folders: its own, or one of the same order among those of its class."""
        if not self.ending:
            return f"{target}/{self.source.path(id).removeprefix(os.path.join(self.source.root, ''))}"  # noqa: PTH118
        folder, name = f"{target}/{self.name}".rstrip("/"), "".join(self.name_of(id))
        return f"{folder}/{self.folders[self.source.labels[id]]}/{id:09}-{name}"


def ending_and_images(
    source: LabeledSource, shorter_side: int, quality: int, megabytes: int, to: str
) -> tuple[str, int]:
    """Return the ending for the format of the first image, and the number of images in a shard, estimated from some."""
    sizes, endings = [], []

    def load(id: int) -> None:
        content = source.read(id)
        sizes.append(len(copy_of(content, shorter_side, quality)))
        endings.append(str(getattr(format_of(content[:HEAD]), "name", "")).lower())

    for id in np.unique(np.linspace(0, len(source) - 1, _SAMPLED, dtype=np.int64)).tolist():
        why_broken(partial(load, id))
    unit, mean = ROWS if to == "parquet" else 1, sum(sizes, 1) / max(1, len(sizes))
    ending = "jpg" if not endings or endings[0].startswith("jpeg") else endings[0]
    return f".{ending}", max(1, round(megabytes * 1e6 / mean / unit)) * unit


def class_names(source: LabeledSource, to: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the folders of the classes in the target, none if numbers stand for them there, and these numbers.

    Raises:
        UsageError: the classes would get other ids in the target.
    """
    classes, remedy = source.classes, "give --to parquet, which keeps them"
    empty = [classes[label] for label in sorted({*range(len(classes))} - {*source.labels.tolist()})]
    if empty and to == "tar":
        shown = summarize(empty, show=repr)
        raise UsageError(f"{source} has no images of {shown}, so that tar shards lack the class: {remedy}")
    if [*classes] == sorted(classes) and not any("/" in each or not each or is_ignored(each) for each in classes):
        return classes, ()
    numbers = [int(each) if each.isascii() and each.isdigit() else -1 for each in classes]
    if all(a < b for a, b in pairwise([-1, *numbers])):
        width = len(classes[-1])
        return tuple(f"{number:0{width}}" for number in numbers) if to == "folder" else (), tuple(numbers)
    if to == "folder":
        shown = summarize(classes, 3, show=repr)
        raise UsageError(f"the classes of {source}, {shown}, get other ids as names of folders: {remedy}")
    if to == "tar":
        _log.warning("%s: tar shards have the numbers of the classes, not their names: --to parquet keeps them", source)
    return (), tuple(range(len(classes)))


def prepare_shard(
    split: Split,
    target: str,
    kind: str,
    shorter_side: int,
    quality: int,
    left_out: Mapping[int, str],
    ids: range,
) -> Written:
    """Write a shard, unless it is there and sound.

    Args:
        split: the originals.
        target: the folder or the URI of the copy.
        kind: tar or parquet.
        shorter_side: see `copy_of`.
        quality: see `copy_of`.
        left_out: reasons for not even trying images, which ended a process.
        ids: of a shard. Any others are only tried, since the process has died of one of a shard.

    Raises:
        DataError: the shard cannot be written.
    """
    source, number, written = split.source, ids.start // split.shard_images, Written()

    def copies() -> Iterator[tuple[int, bytes]]:
        after = b""

        def load(content: bytes | Exception) -> None:
            nonlocal after
            if isinstance(content, Exception):
                raise content
            after = copy_of(content, shorter_side, quality)

        for id, content in _contents(source, ids):
            try:
                why = left_out.get(id) or why_broken(partial(load, content))
            except OSError as error:
                raise DataError(f"{source.path(id)} cannot be read: {reason(error)}; start again") from error
            if why is not None or isinstance(content, Exception):
                written.broken.append(BrokenSample(id, source.path(id), str(why)))
                continue
            yield id, after
            written.made_smaller += after is not content
            written.copied += after is content
            written.bytes_before += len(content)
            written.bytes_after += len(after)

    if ids != range(len(source))[number * split.shard_images : (number + 1) * split.shard_images]:
        deque(copies(), maxlen=0)
        return Written(broken=written.broken)
    name = f"{split.name}/{split.name or 'shard'}-{number:06}.{kind}".lstrip("/")
    folder, _, base = f"{target}/{name}".rpartition("/")
    place, entry_place, state = f"{folder}/{base}", f"{folder}/.{base}.json", _state(source, ids)
    if entry := _entry(entry_place):
        if (size_and_time(place)[0], _sha256(place)) != (entry["bytes"], entry["sha256"]):
            written.damaged.append(place)
        elif entry["state"] == state and not entry["broken"]:
            return Written(there_already=entry["images"], shards=[entry])
    with _temporary(place) as temporary:
        with writing(temporary), Path(temporary).open("wb", _BUFFER) as file:
            (_write_tar if kind == "tar" else _write_parquet)(file, split, copies())
        entry = {
            "name": name,
            "images": written.made_smaller + written.copied,
            "bytes": size_and_time(temporary)[0],
            "sha256": _sha256(temporary),
            "broken": len(written.broken),
            "state": state,
        }
        with writing(place):
            _publish(temporary, place)
    write_file(entry_place, json.dumps(entry).encode())
    written.shards.append(entry)
    return written


def _contents(source: LabeledSource, ids: range) -> Iterator[tuple[int, bytes | Exception]]:
    """Yield ids and contents of images, or the errors of reading them, which several threads read ahead."""

    def content(id: int) -> bytes | Exception:
        try:
            return source.read(id)
        except Exception as error:
            return error

    with ThreadPoolExecutor(_READERS) as threads:
        for begin in range(0, len(ids), _READ_AT_ONCE):
            part = ids[begin : begin + _READ_AT_ONCE]
            yield from zip(part, threads.map(content, part), strict=True)


def _write_tar(file: BinaryIO, split: Split, copies: Iterator[tuple[int, bytes]]) -> None:
    """Write an archive of WebDataset: with the label as the folder of a key, or in a member KEY.cls."""
    keys: set[str] = set()
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for id, content in copies:
            label = int(split.source.labels[id])
            stem, ending = split.name_of(id)
            key = f"{split.folders[label]}/" if split.folders else ""
            key += stem.lstrip(".").replace(".", "_") or "image"
            while key in keys:
                key += f"-{id}"
            keys.add(key)
            members = [(key + ending.lower(), content)]
            if not split.folders:
                members.append((f"{key}.cls", str(split.numbers[label]).encode()))
            for name, data in members:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _write_parquet(file: BinaryIO, split: Split, copies: Iterator[tuple[int, bytes]]) -> None:
    """Write a file as Hugging Face's `datasets` do, with the classes in the schema's metadata."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    features = {IMAGE: {"_type": "Image"}, LABEL: {"names": [*split.source.classes], "_type": "ClassLabel"}}
    schema = pyarrow.schema(
        [(IMAGE, struct), (LABEL, pyarrow.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    with ParquetWriter(file, schema, compression="none", use_dictionary=False, write_statistics=[LABEL]) as writer:
        while rows := [*islice(copies, ROWS)]:
            names = (os.fsencode("".join(split.name_of(id))).decode("utf-8", "replace") for id, _ in rows)
            images = [{"bytes": content, "path": name} for (_, content), name in zip(rows, names, strict=True)]
            labels = [int(split.source.labels[id]) for id, _ in rows]
            writer.write_table(pyarrow.table({IMAGE: images, LABEL: labels}, schema=schema), row_group_size=ROWS)


def _state(source: LabeledSource, ids: range) -> str:
    """Return a hash of the modification times of the originals' files; those of objects are asked for shards only."""
    files = dict.fromkeys(origin(source, id) for id in ids)
    asked = (file for file in files if "://" not in file or isinstance(source, Shards))
    return digest(repr([*map(modified_ns, asked)]).encode())


def _entry(place: str) -> dict[str, Any]:
    """Return the record of a shard; empty if there is none."""
    try:
        return dict(json.loads(read(place)))
    except (OSError, ValueError):
        return {}


def _sha256(path: str) -> str:
    """Return the hash of a file or an object; empty if it cannot be read."""
    hashed = hashlib.sha256()
    try:
        with (
            file_system(path).open_input_stream(path.partition("://")[2], compression=None)
            if "://" in path
            else Path(path).open("rb", 0)
        ) as file:
            while part := file.read(_BUFFER):
                hashed.update(part)
    except OSError:
        return ""
    return hashed.hexdigest()


@contextmanager
def _temporary(place: str) -> Iterator[str]:
    """Yield the path of a local file for what is to be at a place, which is removed if it is still there at the end."""
    if "://" in place:
        with TemporaryDirectory(prefix="raydali-") as folder:
            yield f"{folder}/shard"
        return
    try:
        yield partial_path(place)
    finally:
        Path(partial_path(place)).unlink(missing_ok=True)


def _publish(temporary: str, place: str) -> None:
    if "://" not in place:
        Path(temporary).replace(place)
        return
    from pyarrow.fs import LocalFileSystem, copy_files

    copy_files(temporary, place.partition("://")[2], LocalFileSystem(), file_system(place))
