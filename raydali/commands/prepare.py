"""`raydali prepare`: copy images, smaller if that is wanted, into class folders, tar shards or Parquet files.

    raydali prepare ~/imagenet ~/imagenet-320 --shorter-side 320
    raydali prepare ~/imagenet s3://bucket/imagenet --to tar --shorter-side 0

A copy has the same classes and labels, and the same ids where its form allows. Files are written atomically: each file
of the target is complete, and the same command resumes an earlier one. It makes a file again if its source has changed,
and a shard if it differs from its checksum.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.commands.verify import show
from raydali.errors import DataError, UsageError
from raydali.host.process_pool import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import GIGABYTE, plural, summarize

if TYPE_CHECKING:
    from raydali.commands.image_copies import Written
    from raydali.commands.shard_copies import Split

RECORD = "prepared.json"
"""File in the target: its source and settings, whether it is complete, the number of broken images, and its shards."""
TIMES = "source_times"
"""A key in the record: copies have the time of their source files. Earlier versions did not set the time."""
IMAGES = "shard_images"
"""A key in the record: the number of samples in a shard of each split."""

_WANTED = "give class folders, or train/ and val/ of class folders"


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Copy images, smaller or unchanged, into class folders, tar shards or Parquet files, on a disk or in a bucket.

    Exit code 1: some images are broken and were left out.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder or URI with train/ and val/, or class folders, tar shards, TFRecord, Parquet or IDX files, or a list with
    a line path,label per image."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """Folder or URI for the copy: a new one, or one that the same command has started to fill."""
    to: Literal["folder", "tar", "parquet"] = "folder"
    """Form of the copy: class folders, tar shards or Parquet files."""
    shorter_side: int = 320
    """Maximum length of the shorter side, in pixels: larger images are resized, the others copied unchanged. 0: all are
    copied unchanged, and checked without decoding."""
    quality: int = 90
    """Quality of resized JPEG and lossy WebP images, from 1 to 100."""
    shard_size: int = 256
    """Approximate size of a tar shard or a Parquet file, in MB."""
    root: str | None = None
    """Folder or URI that relative paths in a list start from. Default: the list's folder."""
    label_column: str | None = None
    """Column of a list or of Parquet files with the labels, as `raydali verify` takes it."""
    image_column: str | None = None
    """Column of Parquet files with the images. Default: image."""
    workers: int | None = None
    """Number of processes. Default: one per core."""
    json: JsonFile = None


def main(options: Prepare) -> None:
    """Index the source, copy its images, print a summary and write the file.

    Raises:
        UsageError: an option is invalid, the data cannot be indexed, or the target belongs to something else.
        DataError: images are broken (all others were written and the summary was printed), the target is no longer
            writable, or the storage does not answer.
    """
    began = time.monotonic()
    from raydali.commands.image_copies import Written, make_folder, write_file
    from raydali.data.sources.files import absolute, digest

    workers = process_count(options.workers)
    if options.shorter_side < 0:
        raise UsageError(f"--shorter-side must be 0 (no resizing) or more, not {options.shorter_side}")
    if not 1 <= options.quality <= 100:
        raise UsageError(f"--quality must be from 1 to 100, not {options.quality}")
    if options.shard_size < 1:
        raise UsageError(f"--shard-size must be at least 1, not {options.shard_size}")
    require_writable("--json", options.json)
    target = _target(options)
    splits = _splits(options)
    prints = [split.source.fingerprint for split in splits]
    samples = sum(len(split.source) for split in splits)
    record: dict[str, Any] = {
        "source": absolute(options.source),
        "to": options.to,
        "images": samples,
        "fingerprint": prints[0] if len(prints) == 1 else digest(*map(str.encode, prints)),
        "shorter_side": options.shorter_side,
        "quality": options.quality,
    }
    if options.to != "folder":
        record["shard_size"] = options.shard_size
    with _locked(target):
        kept = _begin(target, record, options, {split.name: split.shard_images for split in splits})
        written = Written()
        for split in splits:
            for folder in split.target_folders(target, options.to):
                make_folder(folder)
            planned = replace(split, shard_images=kept.get(IMAGES, {}).get(split.name, 0))
            written.add(_copied(planned, target, options, kept, workers))
        ended = {"complete": True, "broken": len(written.broken), "shards": written.shards}
        write_file(f"{target}/{RECORD}", _as_json(record | kept | ended))
    seconds = time.monotonic() - began
    show(written.broken)
    print(
        f"{target}: {plural(samples, 'image')} in {seconds:.1f} s: {written.made_smaller} made smaller, "
        f"{written.copied} copied, {written.there_already} done before, {len(written.broken)} broken; "
        f"{written.bytes_before / GIGABYTE:.3f} GB became {written.bytes_after / GIGABYTE:.3f} GB"
    )
    if written.damaged:
        print(f"made {plural(len(written.damaged), 'damaged shard')} again: {summarize(written.damaged)}")
    if options.json is not None:
        broken = [{"path": sample.path, "reason": sample.reason} for sample in written.broken]
        write_json(record | {"target": target} | asdict(written) | {"broken": broken, "seconds": seconds}, options.json)
    if written.broken:
        raise DataError(
            f"left {plural(len(written.broken), 'broken image')} of {samples} out of {target}, which changes ids: "
            f"repair them, and run the command again"
        )


def _target(options: Prepare) -> str:
    from raydali.data.sources.files import absolute

    source, target = absolute(options.source), absolute(options.target)
    if os.path.exists(target) and not os.path.isdir(target):  # noqa: PTH110, PTH112 (never raise)
        raise UsageError(f"{target} is a file: give a folder for the copy")
    paths = [f"/{path}".replace("//", "/") if "://" in path else os.path.realpath(path) for path in (source, target)]
    if ("://" in source) == ("://" in target) and os.path.commonpath(paths) in paths:
        raise UsageError(f"{source} and {target} overlap: give a target outside the source, which does not contain it")
    return target


def _splits(options: Prepare) -> list["Split"]:
    """Index the source, of class folders that stay such as one tree.

    Raises:
        UsageError: it cannot be indexed, or is of another kind, or the classes would get other ids in the target.
    """
    from raydali.commands.shard_copies import Split, class_names, ending_and_images
    from raydali.data.sources.formats import check_column_options, kind_and_files, labeled_images, split_roots
    from raydali.data.sources.labeled import check_classes

    data = options.source.rstrip("/") or "/"
    roots = split_roots(data, ("train", "val"), files=True) or {"": data}
    columns: dict[str, Any] = {"label_column": options.label_column, "image_column": options.image_column}
    check_column_options(*roots.values(), root=options.root, **columns)
    kinds = {kind_and_files(root)[0] for root in roots.values()}
    if "folder" in kinds:
        _refuse_other_tasks(data)
    if kinds == {"folder"} and options.to == "folder":
        return [_tree(data)]
    splits: list[Split] = []
    for name, root in roots.items():
        source = labeled_images(root, options.root, splits[0].source.classes if splits else None, **columns)
        if splits:
            check_classes(splits[0].source, source)
        names, numbers = class_names(splits[0].source if splits else source, options.to)
        ending, images = ending_and_images(
            source, options.shorter_side, options.quality, options.shard_size, options.to
        )
        splits.append(Split(name, source, names, numbers, ending, images))
    return splits


def _tree(data: str) -> "Split":
    """Index the images in a tree of folders by their relative paths, whatever the classes are."""
    from raydali.commands.shard_copies import Split
    from raydali.data.sources.file_rules import select_files
    from raydali.data.sources.files import Files, absolute
    from raydali.data.sources.labeled import IMAGE_EXTENSIONS
    from raydali.data.sources.listing import list_tree

    root = absolute(data)
    listing = list_tree(root, of="class folders")
    del listing[""]
    selected, skipped = select_files(listing, IMAGE_EXTENSIONS)
    images = {folder: sorted(selected.pop(folder)) for folder in sorted(selected)}
    skipped.warn(root, IMAGE_EXTENSIONS)
    if not any(images.values()):
        raise UsageError(f"{data} has no images in folders ({', '.join(IMAGE_EXTENSIONS)}): {_WANTED}")
    folders = tuple(images)
    return Split("", Files.from_folders(root, ((folder, images.pop(folder)) for folder in folders)), folders)


def _refuse_other_tasks(data: str) -> None:
    from raydali.data.sources.listing import entries_or_none

    if any(each.name.startswith("instances_") for each in entries_or_none(f"{data}/annotations")):
        raise UsageError(f"{data} has boxes, which would not fit smaller images: {_WANTED}")
    for split in ("", "/train", "/test"):
        if {"img", "gt"} <= {each.name for each in entries_or_none(f"{data}{split}")}:
            raise UsageError(f"{data} has pairs, whose pixels are the training targets: {_WANTED}")


def _copied(split: "Split", target: str, options: Prepare, kept: dict[str, Any], workers: int) -> "Written":
    """Copy images in several processes; of a shard that has ended its process, all but the image which did that."""
    from raydali.commands.image_copies import Written, killed, prepare_images
    from raydali.commands.shard_copies import prepare_shard

    settings, left_out = (options.shorter_side, options.quality), dict[int, str]()
    source, name = split.source, str(split.source)

    def died(id: int, reason: str) -> Written:
        left_out[id] = reason
        return killed(source, id, reason)

    written = Written()
    if options.to == "folder":
        copy = partial(prepare_images, source, partial(split.place_of, target), *settings, kept[TIMES])
        in_processes(copy, len(source), workers, name, written.add, died)
        return written
    while True:
        known, written = len(left_out), Written()
        copy = partial(prepare_shard, split, target, options.to, *settings, left_out)
        in_processes(copy, len(source), workers, name, written.add, died, split.shard_images)
        if len(left_out) == known:
            return written


@contextmanager
def _locked(target: str) -> Iterator[None]:
    """Create the target and lock it against other commands, if its file system has locks; a bucket has none."""
    if "://" in target:
        yield
        return
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
        folder = os.open(target, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{target} cannot be created: {error.strerror}; give another target") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another `raydali prepare` is writing to {target}: wait until it ends") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(folder)


def _begin(target: str, record: dict[str, Any], options: Prepare, shard_images: dict[str, int]) -> dict[str, Any]:
    """Write the record, or compare it with an earlier one; return what else is in it and stays as it is."""
    from raydali.commands.image_copies import write_file
    from raydali.data.sources.storage import StoreError, read

    kept: dict[str, Any] = {TIMES: "://" not in target} | ({IMAGES: shard_images} if options.to != "folder" else {})
    if _is_empty(target):
        write_file(f"{target}/{RECORD}", _as_json(record | kept | {"complete": False}))
        return kept
    try:
        earlier = json.loads(read(f"{target}/{RECORD}"))
    except StoreError as error:
        raise UsageError(f"{error}: check name, credentials and endpoint") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not empty, and has no {RECORD}: give a new folder") from error
    earlier.setdefault("to", "folder")
    for name, value in record.items():
        if earlier.get(name) != value:
            remedy = "give another target, or remove it"
            if name in ("images", "fingerprint"):
                raise UsageError(f"{options.source} has changed since {target} was made of it: {remedy}")
            option = "" if name == "source" else f"--{name.replace('_', '-')} "
            raise UsageError(f"{target} was made of {option}{earlier.get(name)}, not of {option}{value}: {remedy}")
    return {name: earlier.get(name) for name in kept}


def _is_empty(target: str) -> bool:
    """Return whether nothing is in the target but the file that an interrupted command may have left."""
    from raydali.commands.image_copies import partial_path
    from raydali.data.sources.listing import folder_entries
    from raydali.data.sources.storage import reason

    if "://" not in target:
        return not {path.name for path in Path(target).iterdir()} - {Path(partial_path(f"{target}/{RECORD}")).name}
    try:
        return not [*folder_entries(target)]
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UsageError(f"{target} cannot be listed: check name, credentials and endpoint: {reason(error)}") from error


def _as_json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
