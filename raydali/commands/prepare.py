"""`raydali prepare`: copy a data set with smaller images, so that reading and decoding take less time.

    raydali prepare ~/imagenet ~/imagenet-320 --shorter-side 320
    python jobs/imagenet.py --data ~/imagenet-320

Folders and names do not change, so the copy has the same classes and ids. Files are written atomically: each file of
the target is complete, and the same command resumes an earlier one. A copy has the modification time of its source
file, and is made again if the source has changed.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydali.commands.verify import show
from raydali.errors import DataError, UsageError
from raydali.host.process_pool import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import GIGABYTE, plural

if TYPE_CHECKING:
    from raydali.data.sources.files import Files

RECORD = "prepared.json"
"""File in the target: its source and settings, whether it is complete, and the number of broken images."""
TIMES = "source_times"
"""A key in the record: copies have the time of their source files. Earlier versions did not set the time."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Copy class folders with smaller images, for runs that wait for reading and decoding.

    Exit code 1: some images are broken and were left out.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder or URI with train/ and val/ of class folders, or class folders themselves."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """Local folder for the copy: a new one, or one that the same command has started to fill."""
    shorter_side: int = 320
    """Maximum length of the shorter side, in pixels: larger images are resized, the others copied unchanged."""
    quality: int = 90
    """Quality of resized JPEG and lossy WebP images, from 1 to 100."""
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
    from raydali.commands.image_copies import Written, killed, prepare_images, write_file, writing

    workers = process_count(options.workers)
    if options.shorter_side < 1:
        raise UsageError(f"--shorter-side must be at least 1, not {options.shorter_side}")
    if not 1 <= options.quality <= 100:
        raise UsageError(f"--quality must be from 1 to 100, not {options.quality}")
    require_writable("--json", options.json)
    target = _target(options)
    source, folders = _images(options.source)
    record = {
        "source": source.root,
        "images": len(source),
        "fingerprint": source.fingerprint,
        "shorter_side": options.shorter_side,
        "quality": options.quality,
    }
    with _locked(target):
        exact = _begin(target, record, options)
        for folder in folders:
            with writing(str(Path(target, folder))) as path:
                Path(path).mkdir(parents=True, exist_ok=True)
        written = Written()
        make = partial(prepare_images, source, target, options.shorter_side, options.quality, exact)
        in_processes(make, len(source), workers, str(source), written.add, partial(killed, source))
        write_file(
            f"{target}/{RECORD}", _as_json(record | {TIMES: exact, "complete": True, "broken": len(written.broken)})
        )
    seconds = time.monotonic() - began
    show(written.broken)
    print(
        f"{target}: {plural(len(source), 'image')} in {seconds:.1f} s: {written.made_smaller} made smaller, "
        f"{written.copied} copied, {written.there_already} done before, {len(written.broken)} broken; "
        f"{written.bytes_before / GIGABYTE:.3f} GB became {written.bytes_after / GIGABYTE:.3f} GB"
    )
    if options.json is not None:
        broken = [{"path": sample.path, "reason": sample.reason} for sample in written.broken]
        write_json(record | {"target": target} | asdict(written) | {"broken": broken, "seconds": seconds}, options.json)
    if written.broken:
        raise DataError(
            f"left {plural(len(written.broken), 'broken image')} of {len(source)} out of {target}, which changes ids: "
            f"repair them, and run the command again"
        )


def _target(options: Prepare) -> str:
    from raydali.data.sources.files import absolute

    source, target = absolute(options.source), absolute(options.target)
    if "://" in target:
        raise UsageError(f"{target} is not a local folder: give one, and upload it afterwards")
    if os.path.exists(target) and not os.path.isdir(target):  # noqa: PTH110, PTH112 (never raise)
        raise UsageError(f"{target} is a file: give a folder for the copy")
    if "://" not in source:
        paths = [os.path.realpath(path) for path in (source, target)]
        if os.path.commonpath(paths) in paths:
            raise UsageError(
                f"{source} and {target} overlap: give a target outside the source, which does not contain it"
            )
    return target


def _images(data: str) -> tuple["Files", list[str]]:
    """Return the images in the folders of a root, by their relative paths, and the folders."""
    from raydali.data.sources.file_rules import select_files
    from raydali.data.sources.files import Files, absolute
    from raydali.data.sources.formats import source_kind
    from raydali.data.sources.labeled import IMAGE_EXTENSIONS
    from raydali.data.sources.listing import list_tree
    from raydali.data.sources.tar import holds_shards

    wanted = "give class folders, or train/ and val/ of class folders"
    if source_kind(data) != "folder" or holds_shards(data):
        raise UsageError(f"{data} is a list or shards, which cannot be made smaller: {wanted}")
    root = absolute(data)
    listing = list_tree(root, of="class folders")
    del listing[""]
    if any(name.startswith("instances_") for name in listing.get("annotations", ())):
        raise UsageError(f"{data} has boxes, which would not fit smaller images: {wanted}")
    if any({f"{split}img", f"{split}gt"} <= listing.keys() for split in ("", "train/", "test/")):
        raise UsageError(f"{data} has pairs, whose pixels are the training targets: {wanted}")
    selected, skipped = select_files(listing, IMAGE_EXTENSIONS)
    images = {folder: sorted(selected.pop(folder)) for folder in sorted(selected)}
    skipped.warn(root, IMAGE_EXTENSIONS)
    if not any(images.values()):
        raise UsageError(f"{data} has no images in folders ({', '.join(IMAGE_EXTENSIONS)}): {wanted}")
    folders = [*images]
    return Files.from_folders(root, ((folder, images.pop(folder)) for folder in folders)), folders


@contextmanager
def _locked(target: str) -> Iterator[None]:
    """Create the target and lock it against other commands, if its file system has locks."""
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


def _begin(target: str, record: dict[str, Any], options: Prepare) -> bool:
    """Write the record, or compare it with an earlier one; return whether copies have the time of their source."""
    from raydali.commands.image_copies import partial_path, write_file

    there = {path.name for path in Path(target).iterdir()} - {Path(partial_path(f"{target}/{RECORD}")).name}
    if not there:
        write_file(f"{target}/{RECORD}", _as_json(record | {TIMES: True, "complete": False}))
        return True
    try:
        earlier = json.loads(Path(target, RECORD).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not empty, and has no {RECORD}: give a new folder") from error
    for name, value in record.items():
        if earlier.get(name) != value:
            remedy = "give another target, or remove it"
            if name in ("images", "fingerprint"):
                raise UsageError(f"{options.source} has changed since {target} was made of it: {remedy}")
            option = "" if name == "source" else f"--{name.replace('_', '-')} "
            raise UsageError(f"{target} was made of {option}{earlier.get(name)}, not of {option}{value}: {remedy}")
    return bool(earlier.get(TIMES))


def _as_json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
