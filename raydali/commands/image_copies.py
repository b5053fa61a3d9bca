"""Copies of images, smaller or not, each written atomically: code of `raydali prepare` that runs in worker processes.

    JPEG decoded at 1/2, 1/4 or 1/8 --> resized, antialiased --> upright --> encoded in the same format
         if that is at least twice the size

A smaller copy has only what loaders use: 8-bit pixels, grey or RGB, without alpha, colour profile and EXIF.
"""

import errno
import io
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO

from PIL import ExifTags, Image, ImageOps

from raydali.data.broken.quarantine import BrokenSample, why_broken
from raydali.data.decode.decoder_choice import HEAD, PNG, format_of, plain_shape
from raydali.data.decode.pillow import decoded, in_8_bits, opened
from raydali.data.index.files import Files
from raydali.data.index.labeled import LabeledSource
from raydali.data.read.storage import file_system, reason
from raydali.errors import DataError

BUFFER = 1 << 20  # bytes
PARTIAL = ".part"
"""The ending of files that are being written."""
_READ_AT_ONCE, _READERS = 32, 16
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
        shards: the shards that are complete, see `split_copies`.
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


def copies(
    source: Files | LabeledSource, ids: Sequence[int], shorter_side: int, quality: int, written: Written
) -> Generator[tuple[int, bytes], None, None]:
    """Yield ids of images and the contents of their copies; threads read ahead until it ends or is closed.

    Args:
        source: the originals.
        ids: indices in `source`.
        shorter_side: see `copy_of`.
        quality: see `downscale`.
        written: the outcomes are added here; images that are broken are not yielded.

    Raises:
        DataError: the storage does not answer.
    """
    before = after = b""

    def load(reading: Future[bytes]) -> None:
        nonlocal before, after
        before = reading.result()
        after = copy_of(before, shorter_side, quality)

    with ThreadPoolExecutor(_READERS) as threads:
        for begin in range(0, len(ids), _READ_AT_ONCE):
            for id, reading in [(id, threads.submit(source.read, id)) for id in ids[begin : begin + _READ_AT_ONCE]]:
                try:
                    why = why_broken(partial(load, reading))
                except OSError as error:
                    raise DataError(f"{source.path(id)} cannot be read: {reason(error)}; start again") from error
                if why is not None:
                    written.broken.append(BrokenSample(id, source.path(id), why))
                    continue
                yield id, after
                written.made_smaller += after is not before
                written.copied += after is before
                written.bytes_before += len(before)
                written.bytes_after += len(after)


def is_current(copy: str, changed: int | None) -> bool:
    """Return whether a copy has the modification time of its original, in ns; an object, that or a later one."""
    try:
        if "://" in copy:
            (info,) = file_system(copy).get_file_info([copy.partition("://")[2]])
            return bool(info.size) and (changed is None or info.mtime_ns >= changed)
        there = Path(copy).stat()
    except OSError:
        return False
    # A crash of the machine may leave an empty file; some file systems store whole seconds.
    return there.st_size > 0 and (changed is None or there.st_mtime_ns in (changed, changed - changed % 10**9))


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary file, which becomes the file or the object of this name if the block raises no error."""
    with writing(path):
        if "://" in path:
            with SpooledTemporaryFile(BUFFER, prefix="raydali-") as file:
                yield file  # type: ignore[misc]
                file.seek(0)
                with file_system(path).open_output_stream(path.partition("://")[2], compression=None) as stream:
                    copyfileobj(file, stream, BUFFER)
            return
        name = blake2b(os.fsencode(Path(path).name), digest_size=8).hexdigest()
        temporary = Path(path).with_name(f".{name}{PARTIAL}")  # always the same, and not the name of an image
        try:
            with temporary.open("w+b", BUFFER) as file:
                yield file
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_file(path: str, data: bytes, changed: int | None = None) -> None:
    """Write a file or an object atomically, see `replacing`; a file with the modification time `changed` in ns."""
    with replacing(path) as file:
        file.write(data)
        if changed is not None and "://" not in path:
            file.flush()
            os.utime(file.fileno(), ns=(changed, changed))


def remove(path: str) -> None:
    """Remove a file or an object, if it exists."""
    with writing(path), suppress(FileNotFoundError):
        if "://" in path:
            file_system(path).delete_file(path.partition("://")[2])
        else:
            Path(path).unlink()


def make_folder(path: str) -> None:
    """Create a folder; in a bucket, an object that stands for it, so that classes without images are kept."""
    with writing(path):
        if "://" in path:
            file_system(path).create_dir(path.partition("://")[2])
        else:
            Path(path).mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Convert an OSError inside the block to a DataError that names the path."""
    try:
        yield
    except OSError as error:
        until = "there is room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "that is fixed"
        why = reason(error) if "://" in path else error.strerror
        raise DataError(f"{path} cannot be written: {why}; the same command resumes once {until}") from error


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
    options: dict[str | None, dict[str, Any]] = {
        "JPEG": {"quality": quality},
        "WEBP": {"quality": quality, "lossless": b"VP8L" in before},
        "TIFF": {"compression": "tiff_lzw"},
        "PNG": {},
        "BMP": {},
        "PPM": {},
    }
    if format not in options:
        format = "JPEG" if format == "MPO" else "PNG"
    data = io.BytesIO()
    image.save(data, format, **options[format])
    return data.getvalue()
