"""Copies of images, smaller or not, each written atomically: code of `raydali prepare` that runs in worker processes.

    JPEG decoded at 1/2, 1/4 or 1/8 --> resized, antialiased --> upright --> encoded in the same format
         if that is at least twice the size

A smaller copy has only what loaders use: 8-bit pixels, grey or RGB, without alpha, colour profile and EXIF.
"""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps

from raydali.data.loading.quarantine import BrokenSample, why_broken
from raydali.data.sources.files import Files
from raydali.data.sources.labeled import LabeledSource
from raydali.data.sources.shards import Shards
from raydali.data.sources.storage import file_system, modified_ns, reason
from raydali.data.tasks.decoder_choice import HEAD, PNG, format_of, plain_shape
from raydali.data.tasks.pillow import decoded, in_8_bits, opened
from raydali.errors import DataError

SECOND = 10**9  # ns
_GREY = "1", "L", "LA", "La"
_DECODED_SIDE = 2
"""Minimum shorter side of a JPEG decoded at a fraction of its size, in multiples of the result's shorter side."""


@dataclass
class Written:
    """Outcomes of copying some images.

    Attributes:
        made_smaller, copied: numbers of images that were written, resized and unchanged.
        there_already: number of images that an earlier command had written.
        bytes_before, bytes_after: total sizes of the images that were written, before and after.
        broken: images that were omitted.
        shards: the shards that are complete, see `shard_copies`.
        damaged: shards that differed from their checksum, and were made again.
    """

    made_smaller: int = 0
    copied: int = 0
    there_already: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    broken: list[BrokenSample] = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def add(self, more: "Written") -> int:
        """Add the outcomes of other images; return the number of broken ones so far."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        return len(self.broken)


def prepare_images(
    source: Files | LabeledSource,
    place_of: Callable[[int], str],
    shorter_side: int,
    quality: int,
    exact: bool,
    ids: Iterable[int],
) -> Written:
    """Write the copies of these images that do not exist yet.

    Args:
        source: the originals.
        place_of: returns the path or the URI of a copy.
        shorter_side: see `copy_of`.
        quality: quality of JPEG, 1..100.
        exact: see `_is_current`.
        ids: indices of images in `source`.

    Raises:
        DataError: a copy cannot be written.
    """
    written = Written()
    before = after = b""
    changed: int | None = None

    def load(id: int) -> None:
        nonlocal before, after, changed
        changed = modified_ns(origin(source, id))
        before = source.read(id)
        after = copy_of(before, shorter_side, quality)

    for id in ids:
        path, place = origin(source, id), place_of(id)
        if _is_current(place, path, exact):
            written.there_already += 1
        elif (why := why_broken(partial(load, id))) is not None:
            _remove(place)  # it was made from an earlier version of the source
            written.broken.append(BrokenSample(id, source.path(id), why))
        else:
            write_file(place, after, changed)
            written.made_smaller += after is not before
            written.copied += after is before
            written.bytes_before += len(before)
            written.bytes_after += len(after)
    return written


def origin(source: Files | LabeledSource, id: int) -> str:
    """Return the path or the URI of the file that an image is in."""
    return source.shard(id) if isinstance(source, Shards) else source.path(id)


def killed(source: Files | LabeledSource, id: int, reason: str) -> Written:
    """Return the outcome of an image that ended the process which copied it."""
    return Written(broken=[BrokenSample(id, source.path(id), reason)])


def _is_current(copy: str, path: str, exact: bool) -> bool:
    """Return whether a copy exists and was made from the current version of its source, the file at `path`.

    If `exact`, copies have the modification time of their source (whole seconds on some file systems); otherwise they
    have the time when they were written.
    """
    size, written = size_and_time(copy)
    if not size:  # a crash of the machine may leave an empty file
        return False
    changed = modified_ns(path)
    if changed is None:
        return True
    if exact:
        return written in (changed, changed - changed % SECOND)
    return written >= changed


def size_and_time(path: str) -> tuple[int, int]:
    """Return the size of a file or an object in bytes, and its modification time in ns; zeros if there is none."""
    try:
        if "://" in path:
            (found,) = file_system(path).get_file_info([path.partition("://")[2]])
            return found.size or 0, found.mtime_ns or 0
        there = Path(path).stat()
    except OSError:
        return 0, 0
    return there.st_size, there.st_mtime_ns


def write_file(path: str, data: bytes, changed: int | None = None) -> None:
    """Write a file or an object atomically, a file with the modification time `changed` in ns.

    Raises:
        DataError: it cannot be written.
    """
    temporary = partial_path(path)
    with writing(path):
        if "://" in path:
            with file_system(path).open_output_stream(path.partition("://")[2], compression=None) as stream:
                stream.write(data)
            return
        try:
            Path(temporary).write_bytes(data)
            if changed is not None:
                os.utime(temporary, ns=(changed, changed))
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def _remove(path: str) -> None:
    with writing(path):
        if "://" not in path:
            Path(path).unlink(missing_ok=True)
        elif size_and_time(path)[0]:
            file_system(path).delete_file(path.partition("://")[2])


def make_folder(path: str) -> None:
    """Create a folder; in a bucket, an object that stands for it, so that classes without images are kept."""
    with writing(path):
        if "://" in path:
            file_system(path).create_dir(path.partition("://")[2])
        else:
            Path(path).mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: str) -> Iterator[str]:
    """Convert an OSError inside the block to a DataError that names the path."""
    try:
        yield path
    except OSError as error:
        until = "there is room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "that is fixed"
        why = reason(error) if "://" in path else error.strerror
        raise DataError(f"{path} cannot be written: {why}; the same command resumes once {until}") from error


def partial_path(path: str) -> str:
    """Return the path of a file while it is being written: always the same, and not the name of an image."""
    name = os.fsencode(Path(path).name)
    return str(Path(path).with_name(f".{blake2b(name, digest_size=8).hexdigest()}.part"))


def copy_of(data: bytes, shorter_side: int, quality: int) -> bytes:
    """Return the content of an image's copy, which is `data` itself if the image is not larger than `shorter_side`.

    Args:
        data: content of a file in any format that Pillow reads.
        shorter_side: in pixels; 0: of any length. Then only the header of a plain image and the end of a JPEG are read.
        quality: see `downscale`.

    Raises:
        Exception: the image is broken, as far as it is read.
    """
    if shorter_side:
        return downscale(data, shorter_side, quality) or data
    if plain_shape(memoryview(data)) is None:
        decoded(data)
    else:
        opened(data)
    return data


def downscale(data: bytes, shorter_side: int, quality: int) -> bytes | None:
    """Resize an image file to a shorter side of `shorter_side` pixels; None if it is not larger than that.

    Args:
        data: content of a file in any format that Pillow reads; only the first picture of several is used.
        shorter_side: at least 1; the other side is rounded.
        quality: quality of JPEG and lossy WebP, 1..100.

    Returns:
        The content of a file: JPEG, PNG, WebP, BMP, PNM and TIFF keep their format, others become PNG.

    Raises:
        Exception: in exactly the cases in which `decoded` raises one.
    """
    if plain_shape(memoryview(data)) is None:  # then this may not be done in this process
        whole = decoded(data)
        format = (format_of(data[:HEAD]) or PNG).name
        if min(whole.size) <= shorter_side:
            return None
        grey = whole.convert("L")
        small = _shrunk(grey if grey.convert("RGB") == whole else whole, shorter_side, (0, 0, *whole.size))
        return _encoded(small, format, data, quality)
    image = opened(data)
    if min(image.size) <= shorter_side:
        decoded(data)
        return None
    drafted = image.draft(None, (_DECODED_SIDE * shorter_side,) * 2)
    image.load()
    box = drafted[1] if drafted else (0, 0, *image.size)  # at a fraction, the last row and column may be partial
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    small = in_8_bits(image)
    small = small.convert("L" if small.mode in _GREY else "RGB")
    small = _shrunk(small, shorter_side, box)
    small.info = {}
    small.getexif()[ExifTags.Base.Orientation] = orientation
    return _encoded(ImageOps.exif_transpose(small), image.format, data, quality)


def _shrunk(image: Image.Image, shorter_side: int, box: tuple[int, int, float, float]) -> Image.Image:
    """Return a part of an image, resized to a shorter side."""
    width, height = (max(1, round(shorter_side * side / min(box[2:]))) for side in box[2:])
    return image.resize((width, height), Image.Resampling.LANCZOS, box)


def _encoded(image: Image.Image, format: str | None, before: bytes, quality: int) -> bytes:
    options: dict[str, Any]
    match format:
        case "JPEG" | "MPO":
            format, options = "JPEG", {"quality": quality}
        case "WEBP":
            options = {"quality": quality, "lossless": b"VP8L" in before}
        case "TIFF":
            options = {"compression": "tiff_lzw"}
        case "PNG" | "BMP" | "PPM":
            options = {}
        case _:
            format, options = "PNG", {}
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()
