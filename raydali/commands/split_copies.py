"""Copies of a data set's splits in folders, tar archives or Parquet files, for `raydali prepare`.

    ids of a shard --> read, copied --> a temporary file, hashed --> renamed or uploaded --> its record, .NAME.json

A shard is complete when its record exists, and sound while it has the hash in there. Its samples are consecutive ids of
the source, so that images of the shards have the same ids.
"""

import hashlib
import io
import json
import logging
import os
import tarfile
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raydali.commands.image_copies import BUFFER, PARTIAL, Written, copies, is_current, remove, replacing, write_file
from raydali.data.broken.quarantine import BrokenSample
from raydali.data.decode.decoder_choice import HEAD, format_of
from raydali.data.index.file_rules import is_ignored, select_files
from raydali.data.index.files import Files, absolute, digest
from raydali.data.index.formats import check_column_options, kind_and_files, labeled_images, split_roots
from raydali.data.index.labeled import IMAGE_EXTENSIONS, LabeledSource, check_classes
from raydali.data.index.listing import entries_or_none, list_tree
from raydali.data.index.parquet import IMAGE, LABEL
from raydali.data.index.shards import Shards
from raydali.data.read.storage import file_system, modified_ns, read
from raydali.errors import DataError, UsageError
from raydali.host.all_samples import in_processes
from raydali.text import summarize

ROWS = 100
"""Number of rows in a row group of Parquet, as in data sets of Hugging Face."""
_SAMPLED = 64
"""Number of images from which the mean size of the copies is estimated."""
_WANTED = "give class folders, or train/ and val/ of class folders"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Split:
    """Images that are copied together, and their names in the target.

    Attributes:
        options: `Prepare` with an absolute target.
        name: such as train; empty if the data has no splits.
        source: the images; without labels if they keep their paths.
        folders: the classes' folders, or all folders of images that keep their paths; empty: labels are numbers.
        numbers: the number of each class, which stands for it then.
        ending: of names that have none in the source; empty: images keep their paths.
        shard_images: number of samples in a shard.
    """

    options: Any
    name: str
    source: Any
    folders: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    ending: str = ""
    shard_images: int = 0

    @property
    def root(self) -> str:
        """The folder of the copies."""
        return f"{self.options.target}/{self.name}".rstrip("/")

    def name_of(self, id: int) -> tuple[str, str]:
        """Return the name of an image without its folder, before and after its last dot; the latter begins with it."""
        name = self.source.path(id)
        if isinstance(self.source, Shards):
            name = name.removeprefix(self.source.shard(id) + self.source.mark)
        stem, ending = os.path.splitext(os.path.basename(name))  # noqa: PTH119, PTH122 (it may be a URI)
        return (stem, ending) if ending.lower() in IMAGE_EXTENSIONS else (stem + ending, self.ending)

    def place_of(self, id: int) -> str:
        """Return the path of a copy in folders: its own, or one of the same order in its class's folder."""
        if not self.ending:
            return f"{self.root}/{self.source.path(id).removeprefix(os.path.join(self.source.root, ''))}"  # noqa: PTH118
        return f"{self.root}/{self.folders[self.source.labels[id]]}/{id:09}-{''.join(self.name_of(id))}"


def index_splits(options: Any) -> list[Split]:  # noqa: ANN401 (`Prepare`; importing it would be a circle)
    """Index the source, of class folders that stay such as one tree.

    Raises:
        UsageError: it cannot be indexed, or is of another kind, or the classes would get other ids in the target.
    """
    data = options.source.rstrip("/") or "/"
    roots = split_roots(data, ("train", "val"), files=True) or {"": data}
    columns: dict[str, Any] = {"label_column": options.label_column, "image_column": options.image_column}
    check_column_options(*roots.values(), root=options.root, **columns)
    kinds = {kind_and_files(root)[0] for root in roots.values()}
    if "folder" in kinds:
        _refuse_other_tasks(data)
    if kinds == {"folder"} and options.to == "folder":
        return [Split(options, "", *_tree(data))]
    splits: list[Split] = []
    for name, root in roots.items():
        source = labeled_images(root, options.root, splits[0].source.classes if splits else None, **columns)
        if splits:
            check_classes(splits[0].source, source)
        names, numbers = _class_names(splits[0].source if splits else source, options.to)
        splits.append(_with_estimates(Split(options, name, source, names, numbers)))
    return splits


def _tree(data: str) -> tuple[Files, tuple[str, ...]]:
    """Index the images in a tree of folders by their relative paths, whatever the classes are."""
    root = absolute(data)
    listing = list_tree(root, of="class folders")
    del listing[""]
    selected, skipped = select_files(listing, IMAGE_EXTENSIONS)
    skipped.warn(root, IMAGE_EXTENSIONS)
    if not any(selected.values()):
        raise UsageError(f"{data} has no images in folders ({', '.join(IMAGE_EXTENSIONS)}): {_WANTED}")
    folders = sorted(selected)
    return Files.from_folders(root, ((folder, sorted(selected.pop(folder))) for folder in folders)), tuple(folders)


def _refuse_other_tasks(data: str) -> None:
    if any(entry.name.startswith("instances_") for entry in entries_or_none(f"{data}/annotations")):
        raise UsageError(f"{data} has boxes, which would not fit smaller images: {_WANTED}")
    for split in ("", "/train", "/test"):
        if {"img", "gt"} <= {entry.name for entry in entries_or_none(f"{data}{split}")}:
            raise UsageError(f"{data} has pairs, whose pixels are the training targets: {_WANTED}")


def _with_estimates(split: Split) -> Split:
    """Return the split with the ending of the first image's format, and the number of samples in a shard."""
    source, options = split.source, split.options
    ids = np.unique(np.linspace(0, len(source) - 1, _SAMPLED, dtype=np.int64)).tolist()
    written = Written()
    made = copies(source, ids, options.shorter_side, options.quality, written)
    first, *_ = [format_of(content[:HEAD]) for _, content in made] or [None]
    ending = "jpg" if first is None or first.name.startswith("JPEG") else first.name.lower()
    unit = ROWS if options.to == "parquet" else 1
    mean = max(1, written.bytes_after) / max(1, written.made_smaller + written.copied)
    images = max(1, round(options.shard_size * 1e6 / mean / unit)) * unit
    return replace(split, ending=f".{ending}", shard_images=images)


def _class_names(source: LabeledSource, to: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the folders of the classes in the target, none if numbers stand for them there, and these numbers.

    Raises:
        UsageError: the classes would get other ids in the target.
    """
    classes, remedy = source.classes, "give --to parquet, which keeps them"
    empty = [classes[label] for label in sorted({*range(len(classes))} - {*source.labels.tolist()})]
    if empty and to == "tar":
        shown = summarize(empty, show=repr)
        raise UsageError(f"{source} has no images of {shown}, so that tar shards lack the class: {remedy}")
    if [*classes] == sorted(classes) and not any("/" in name or not name or is_ignored(name) for name in classes):
        return classes, ()
    numbers = [int(name) if name.isascii() and name.isdigit() else -1 for name in classes]
    if all(a < b for a, b in pairwise([-1, *numbers])):
        width = len(classes[-1])
        return tuple(f"{number:0{width}}" for number in numbers) if to == "folder" else (), tuple(numbers)
    if to == "folder":
        shown = summarize(classes, 3, show=repr)
        raise UsageError(f"the classes of {source}, {shown}, get other ids as names of folders: {remedy}")
    if to == "tar":
        _log.warning("%s: tar shards have the numbers of the classes, not their names: --to parquet keeps them", source)
    return (), tuple(range(len(classes)))


def copy_split(split: Split, workers: int, written: Written) -> None:
    """Copy images in several processes, and add the outcomes."""
    source, to_folder = split.source, split.options.to == "folder"

    def died(id: int, reason: str) -> Written:
        if to_folder:
            return Written(broken=[BrokenSample(id, source.path(id), reason)])
        raise DataError(f"{source.path(id)} cannot be copied: {reason}; repair it, or empty its file, and start again")

    copy = partial(_copy_images if to_folder else _copy_shard, split)
    try:
        in_processes(copy, len(source), workers, str(source), written.add, died, split.shard_images)
    except BaseException:
        with suppress(OSError):  # the disk itself may have failed
            for unfinished in Path(split.root).rglob(f".*{PARTIAL}"):  # of processes that were ended meanwhile
                unfinished.unlink()
        raise


def _copy_images(split: Split, ids: range) -> Written:
    """Write the copies of these images in folders, unless they are there.

    Raises:
        DataError: the storage does not answer, or a copy cannot be written.
    """
    source, options, written = split.source, split.options, Written()
    changed = {id: modified_ns(_origin(source, id)) for id in ids}
    wanted = [id for id in ids if not is_current(split.place_of(id), changed[id])]
    written.there_already = len(ids) - len(wanted)
    with closing(copies(source, wanted, options.shorter_side, options.quality, written)) as made:
        for id, content in made:
            write_file(split.place_of(id), content, changed[id])
    for sample in written.broken:  # the copy was made from an earlier version of the source
        remove(split.place_of(sample.id))
    return written


def _copy_shard(split: Split, ids: range) -> Written:
    """Write the shard that ends with the last of these images, unless it is there and sound.

    After a process has died of a shard, `in_processes` gives its images one by one: all but the last are only tried.

    Raises:
        DataError: the storage does not answer, or the shard cannot be written.
    """
    source, options, written = split.source, split.options, Written()
    number = ids.start // split.shard_images
    shard = range(len(source))[number * split.shard_images : (number + 1) * split.shard_images]
    made = partial(copies, source, shorter_side=options.shorter_side, quality=options.quality, written=written)
    if ids.stop != shard.stop:
        deque(made(ids), maxlen=0)
        return Written()
    name = f"{split.name or 'shard'}-{number:06}.{options.to}"
    place, entry_place, state = f"{split.root}/{name}", f"{split.root}/.{name}.json", _state(source, shard)
    entry: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        entry = json.loads(read(entry_place))
    if entry:
        if _sha256(place) != entry["sha256"]:
            written.damaged.append(place)
        elif entry["state"] == state and not entry["broken"]:
            return Written(there_already=entry["images"], shards=[entry])
    with replacing(place) as file, closing(made(shard)) as images:
        (_write_tar if options.to == "tar" else _write_parquet)(file, split, images)
        file.seek(0)
        entry = {
            "name": place.removeprefix(f"{options.target}/"),
            "images": written.made_smaller + written.copied,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),  # type: ignore[arg-type]
            "bytes": file.tell(),
            "broken": len(written.broken),
            "state": state,
        }
    write_file(entry_place, json.dumps(entry).encode())
    written.shards.append(entry)
    return written


def _origin(source: Files | LabeledSource, id: int) -> str:
    """Return the path or the URI of the file that an image is in."""
    return source.shard(id) if isinstance(source, Shards) else source.path(id)


def _state(source: LabeledSource, ids: range) -> str:
    """Return a hash of the modification times of the originals' files; among objects, only shards are asked."""
    files = dict.fromkeys(_origin(source, id) for id in ids)
    asked = (file for file in files if "://" not in file or isinstance(source, Shards))
    return digest(repr([*map(modified_ns, asked)]).encode())


def _sha256(path: str) -> str:
    """Return the hash of a file or an object; empty if it cannot be read."""
    key = path.partition("://")[2]
    try:
        with file_system(path).open_input_stream(key, None, BUFFER) if key else Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _write_tar(file: BinaryIO, split: Split, made: Iterator[tuple[int, bytes]]) -> None:
    """Write an archive of WebDataset: with the label as the folder of a key, or in a member KEY.cls."""
    keys: set[str] = set()
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for id, content in made:
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


def _write_parquet(file: BinaryIO, split: Split, made: Iterator[tuple[int, bytes]]) -> None:
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
        while rows := [*islice(made, ROWS)]:
            names = (os.fsencode("".join(split.name_of(id))).decode("utf-8", "replace") for id, _ in rows)
            images = [{"bytes": content, "path": name} for (_, content), name in zip(rows, names, strict=True)]
            labels = [int(split.source.labels[id]) for id, _ in rows]
            writer.write_table(pyarrow.table({IMAGE: images, LABEL: labels}, schema=schema), row_group_size=ROWS)
