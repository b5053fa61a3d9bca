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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from raydali.commands.verify import show
from raydali.errors import DataError, UsageError
from raydali.host.all_samples import SAMPLES_AT_ONCE, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import GIGABYTE, plural, summarize

RECORD = "prepared.json"
"""File in the target: its source and settings, whether it is complete, the number of broken images, and its shards."""
IMAGES = "shard_images"
"""A key in the record: the number of samples in a shard of each split."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Copy images, smaller or unchanged, into class folders, tar shards or Parquet files, on a disk or in a bucket.

    Exit code 1: some images are broken and were left out.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder or URI with train/ and val/, or class folders, tar shards, TFRecord or Parquet files, or a list with a
    line path,label per image."""
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
    from raydali.commands.split_copies import copy_split, index_splits
    from raydali.data.index.files import absolute, digest

    workers = process_count(options.workers)
    if options.shorter_side < 0:
        raise UsageError(f"--shorter-side must be 0 (no resizing) or more, not {options.shorter_side}")
    if not 1 <= options.quality <= 100:
        raise UsageError(f"--quality must be from 1 to 100, not {options.quality}")
    if options.shard_size < 1:
        raise UsageError(f"--shard-size must be at least 1, not {options.shard_size}")
    require_writable("--json", options.json)
    source, target = absolute(options.source), absolute(options.target)
    _check_places(source, target)
    options = replace(options, target=target)
    splits = index_splits(options)
    prints = [split.source.fingerprint for split in splits]
    samples = sum(len(split.source) for split in splits)
    record: dict[str, Any] = {
        "source": source,
        "to": options.to,
        "images": samples,
        "fingerprint": prints[0] if len(prints) == 1 else digest(*map(str.encode, prints)),
        "shorter_side": options.shorter_side,
        "quality": options.quality,
    }
    if options.to != "folder":
        record |= {"shard_size": options.shard_size, IMAGES: {split.name: split.shard_images for split in splits}}
    with _locked(target):
        record = _begin(record, options)
        written = Written()
        for split in splits:
            for folder in split.folders if options.to == "folder" else [""]:
                make_folder(f"{split.root}/{folder}".rstrip("/"))
            at_once = record[IMAGES][split.name] if IMAGES in record else SAMPLES_AT_ONCE
            copy_split(replace(split, shard_images=at_once), workers, written)
        ended = {"complete": True, "broken": len(written.broken), "shards": written.shards}
        write_file(f"{target}/{RECORD}", json.dumps(record | ended, indent=2).encode())
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


def _check_places(source: str, target: str) -> None:
    if os.path.exists(target) and not os.path.isdir(target):  # noqa: PTH110, PTH112 (never raise)
        raise UsageError(f"{target} is a file: give a folder for the copy")
    paths = [f"/{path}".replace("//", "/") if "://" in path else os.path.realpath(path) for path in (source, target)]
    if ("://" in source) == ("://" in target) and os.path.commonpath(paths) in paths:
        raise UsageError(f"{source} and {target} overlap: give a target outside the source, which does not contain it")


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
    with ExitStack() as at_end:
        at_end.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another `raydali prepare` is writing to {target}: wait until it ends") from error
        except OSError:
            pass
        yield


def _begin(record: dict[str, Any], options: Prepare) -> dict[str, Any]:
    """Write the record, or compare it with an earlier one; return it with the earlier number of samples in a shard."""
    from raydali.commands.image_copies import PARTIAL, write_file
    from raydali.data.index.listing import folder_entries
    from raydali.data.read.storage import read, reason

    target, place = options.target, f"{options.target}/{RECORD}"
    names, earlier = list[str](), dict[str, Any]()
    try:
        names += [entry.name for entry in folder_entries(target) if not entry.name.endswith(PARTIAL)]
        earlier = {"to": "folder"} | json.loads(read(place))
    except (FileNotFoundError, ValueError):
        pass
    except OSError as error:
        raise UsageError(f"{target} cannot be listed: check name, credentials and endpoint: {reason(error)}") from error
    if not names:
        write_file(place, json.dumps(record | {"complete": False}, indent=2).encode())
        return record
    if not earlier:
        raise UsageError(f"{target} is not empty, and has no {RECORD}: give a new folder")
    if IMAGES in record:
        record[IMAGES] = earlier.get(IMAGES)
    for name, value in record.items():
        if (was := earlier.get(name)) != value:
            remedy = "give another target, or remove it"
            if name in ("images", "fingerprint"):
                raise UsageError(f"{options.source} has changed since {target} was made of it: {remedy}")
            option = "" if name == "source" else f"--{name.replace('_', '-')} "
            raise UsageError(f"{target} was made of {option}{was}, not of {option}{value}: {remedy}")
    return record
