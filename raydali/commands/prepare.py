"""`raydali prepare`: a copy of a data set whose images are stored smaller, so that reading and decoding cost less.

    raydali prepare ~/imagenet ~/imagenet-320 --shorter-side 320
    python jobs/imagenet.py --data ~/imagenet-320

Folders and names stay, so both have the same classes and ids. A file is written beside its place and then renamed:
what stands there is whole, and the same command goes on where an earlier one ended. A copy has the time of the file
that it is made of, and is made again once that file has another one.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydali.commands.verify import show
from raydali.data.sources import storage
from raydali.errors import DataError, UsageError
from raydali.host.process_pool import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json

if TYPE_CHECKING:
    from raydali.data.loading.quarantine import BrokenSample
    from raydali.data.sources.files import Files

RECORD = "prepared.json"
"""In the target: what it is made of, whether all that can be read stands there, and how many were broken."""
TIMES = "source_times"
"""In the record: copies have the time of the file that they are made of. Earlier versions left that of writing."""
GIGABYTE, SECOND = 1e9, 10**9  # bytes, ns


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Copy class folders with their images made smaller, for runs that wait for reading and decoding. Exit code 1:
    some are broken, and left out."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder or URI with train/ and val/ of class folders, or class folders themselves."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """Local folder for the copy: a new one, or one that the same command has begun."""
    shorter_side: int = 320
    """Of the images, in pixels: those whose shorter side is longer are resized, the others copied as they are."""
    quality: int = 90
    """Of JPEGs that are resized, and of WebP that is not lossless: 1 to 100."""
    workers: int | None = None
    """Processes. Default: one for each core."""
    json: JsonFile = None


@dataclass
class Written:
    """What became of some images.

    Attributes:
        made_smaller, copied: how many were written now.
        there_already: how many an earlier run had written.
        bytes_before, bytes_after: of those written now.
        broken: those left out.
    """

    made_smaller: int = 0
    copied: int = 0
    there_already: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    broken: list["BrokenSample"] = field(default_factory=list)

    def add(self, more: "Written") -> int:
        """Take up what became of others; how many are broken so far."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        return len(self.broken)


def main(options: Prepare) -> None:
    """Index, copy, say and write what was done.

    Raises:
        UsageError: an option that cannot be met, data that cannot be indexed, or a target of something else.
        DataError: images are broken, after all others were written and it was told; the target cannot be written any
            more, or the storage does not answer.
    """
    begun = time.monotonic()
    workers = process_count(options.workers)
    if options.shorter_side < 1:
        raise UsageError(f"--shorter-side must be at least 1, not {options.shorter_side}")
    if not 1 <= options.quality <= 100:
        raise UsageError(f"--quality must lie in 1..100, not {options.quality}")
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
    with _alone(target):
        exact = _begin(target, record, options)
        for folder in folders:
            with _writing(os.path.join(target, folder)) as path:
                os.makedirs(path, exist_ok=True)
        written = Written()
        make = partial(_prepared, source, target, options.shorter_side, options.quality, exact)
        in_processes(make, len(source), workers, str(source), written.add)
        _write(f"{target}/{RECORD}", _as_json(record | {TIMES: exact, "complete": True, "broken": len(written.broken)}))
    seconds = time.monotonic() - begun
    show(written.broken)
    print(
        f"{target}: {len(source)} images in {seconds:.1f} s: {written.made_smaller} made smaller, {written.copied} "
        f"copied, {written.there_already} there already, {len(written.broken)} broken; "
        f"{written.bytes_before / GIGABYTE:.3f} GB became {written.bytes_after / GIGABYTE:.3f} GB"
    )
    if options.json is not None:
        broken = [{"path": sample.path, "reason": sample.reason} for sample in written.broken]
        write_json(record | {"target": target} | asdict(written) | {"broken": broken, "seconds": seconds}, options.json)
    if written.broken:
        raise DataError(
            f"{len(written.broken)} of {len(source)} images are broken and left out of {target}, where ids are "
            f"therefore others: repair them, and the same command adds them"
        )


def _target(options: Prepare) -> str:
    from raydali.data.sources.files import absolute

    source, target = absolute(options.source), absolute(options.target)
    if "://" in target:
        raise UsageError(f"{target} is no local folder: give one, and upload it afterwards")
    if os.path.exists(target) and not os.path.isdir(target):
        raise UsageError(f"{target} is a file: give a folder for the copy")
    if "://" not in source:
        paths = [os.path.realpath(path) for path in (source, target)]
        if os.path.commonpath(paths) in paths:
            raise UsageError(f"{source} and {target} are one folder, or one lies in the other: give a target beside it")
    return target


def _images(data: str) -> tuple["Files", list[str]]:
    """The images in the folders of a root, by their relative paths; and the folders."""
    from raydali.data.sources.files import Files, absolute
    from raydali.data.sources.formats import source_kind
    from raydali.data.sources.image_folder import EXTENSIONS
    from raydali.data.sources.listing import list_tree
    from raydali.data.sources.skipped_files import select_files
    from raydali.data.sources.tar import holds_shards

    wanted = "give a folder with train/ and val/ of class folders, or class folders themselves"
    if source_kind(data) != "folder" or holds_shards(data):
        raise UsageError(f"{data} is a list, tar shards or TFRecord files, which are not copied: {wanted}")
    root = absolute(data)
    listing = list_tree(root, of="class folders")
    del listing[""]
    if any(name.startswith("instances_") for name in listing.get("annotations", ())):
        raise UsageError(f"{data} holds boxes, in annotations/, which would not fit smaller images: {wanted}")
    if any({f"{split}img", f"{split}gt"} <= listing.keys() for split in ("", "train/", "test/")):
        raise UsageError(f"{data} holds pairs, in img/ and gt/, whose pixels are what is to be learnt: {wanted}")
    selected, skipped = select_files(listing, EXTENSIONS)
    images = {folder: sorted(selected.pop(folder)) for folder in sorted(selected)}
    skipped.warn(root, EXTENSIONS)
    if not any(images.values()):
        raise UsageError(f"no images in the folders of {data}, {', '.join(EXTENSIONS)}: {wanted}")
    folders = [*images]
    return Files.from_folders(root, ((folder, images.pop(folder)) for folder in folders)), folders


@contextmanager
def _alone(target: str) -> Iterator[None]:
    """Keep others from writing to the target, which is made; where its file system has no locks, trust that none do."""
    try:
        os.makedirs(target, exist_ok=True)
        folder = os.open(target, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{target} cannot be made: {error.strerror}; give another target") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another `raydali prepare` writes to {target}: wait for its end") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(folder)


def _begin(target: str, record: dict[str, Any], options: Prepare) -> bool:
    """Write what the target is made of; or compare, where it was begun before. Whether copies have their source's
    time."""
    there = set(os.listdir(target)) - {os.path.basename(_beside(f"{target}/{RECORD}"))}
    if not there:
        _write(f"{target}/{RECORD}", _as_json(record | {TIMES: True, "complete": False}))
        return True
    try:
        earlier = json.loads(Path(target, RECORD).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} is not empty, and holds no {RECORD}: give a new folder") from error
    for name, value in record.items():
        if earlier.get(name) != value:
            remedy = "give another target, or remove it"
            if name in ("images", "fingerprint"):
                raise UsageError(f"{options.source} has other files than when {target} was made of it: {remedy}")
            option = "" if name == "source" else f"--{name.replace('_', '-')} "
            raise UsageError(f"{target} was made of {option}{earlier.get(name)}, not of {option}{value}: {remedy}")
    return bool(earlier.get(TIMES))


def _as_json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


# In the processes


def _prepared(
    source: "Files", target: str, shorter_side: int, quality: int, exact: bool, ids: Iterable[int]
) -> Written:
    from raydali.commands.downscale import smaller
    from raydali.data.loading.quarantine import BrokenSample
    from raydali.data.loading.read_errors import why_broken

    written = Written()
    before = after = b""
    changed: int | None = None

    def load(id: int) -> None:
        nonlocal before, after, changed
        changed = _changed(source.path(id))
        before = source.read(id)
        made = smaller(before, shorter_side, quality)
        after = before if made is None else made

    for id in ids:
        path = source.path(id)
        place = os.path.join(target, path.removeprefix(os.path.join(source.root, "")))
        if _is_current(place, path, exact):
            written.there_already += 1
        elif (reason := why_broken(partial(load, id))) is not None:
            with _writing(place):
                Path(place).unlink(missing_ok=True)  # made of what stood there before
            written.broken.append(BrokenSample(id, path, reason))
        else:
            _write(place, after, changed)
            written.made_smaller += after is not before
            written.copied += after is before
            written.bytes_before += len(before)
            written.bytes_after += len(after)
    return written


def _changed(path: str) -> int | None:
    """When a file was last changed, in ns; None: it cannot be told."""
    try:
        if "://" not in path:
            return os.stat(path).st_mtime_ns
        (found,) = storage.file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:  # reading it tells why
        return None
    return found.mtime_ns  # type: ignore[no-any-return]


def _is_current(copy: str, path: str, exact: bool) -> bool:
    """Whether a copy stands there and was made of the file as it is now.

    Args:
        exact: it has the time of what it was made of, whole seconds on some file systems; else that of its making.
    """
    try:
        there = os.stat(copy)
    except OSError:
        return False
    if not there.st_size:  # as a machine that goes down may leave a file
        return False
    changed = _changed(path)
    if changed is None:
        return True
    if exact:
        return there.st_mtime_ns in (changed, changed - changed % SECOND)
    return there.st_mtime_ns >= changed


def _write(path: str, data: bytes, changed: int | None = None) -> None:
    """Write a file as a whole, or not at all; as of the time `changed`, in ns.

    Raises:
        DataError: it cannot be written.
    """
    beside = _beside(path)
    with _writing(path):
        try:
            Path(beside).write_bytes(data)
            if changed is not None:
                os.utime(beside, ns=(changed, changed))
            os.replace(beside, path)
        except OSError:
            Path(beside).unlink(missing_ok=True)
            raise


@contextmanager
def _writing(path: str) -> Iterator[str]:
    try:
        yield path
    except OSError as error:
        until = "there is room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "that is mended"
        raise DataError(
            f"{path} cannot be written: {error.strerror}; once {until}, the same command goes on"
        ) from error


def _beside(path: str) -> str:
    """No image by its name, and no longer than names may be; the same each time, so that none is left over."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{blake2b(os.fsencode(name), digest_size=8).hexdigest()}.part")
