"""Finds suspicious image files in a batch by their first and last bytes, their sizes and shapes.

A truncated JPEG still decodes if the crop is above the cut. To wait for an error is therefore not enough: whether a
sample is broken must not depend on the crop of an epoch. A suspicious file is read as a whole, once in a run
(quarantine.py). Most of them are sound: JPEGs with extra bytes after their end; TIFF, BMP and PNM, whose last bytes do
not show a cut, and of which DALI decodes some that Pillow refuses.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.tasks.image_formats import HEAD, JPEG, JPEG_2000, PNG, TAIL, WEBP, Format
from raydali.data.tasks.pillow import has_end

if TYPE_CHECKING:
    from nvidia.dali.tensors import TensorListCPU

MAX_PIXELS = 178_956_970
"""Pixels of an image. Pillow refuses larger ones as decompression bombs (twice PIL.Image.MAX_IMAGE_PIXELS)."""

Bytes = NDArray[np.uint8]
Suspects = NDArray[np.bool_]


def suspicious(
    heads: Bytes, tails: Bytes, lengths: NDArray[np.int64], content: Callable[[int], Any] | None = None
) -> Suspects:
    """Return which files (n,) seem too short, cut off or of an unknown kind, by their first and last bytes.

    Args:
        heads: (n, HEAD) first bytes.
        tails: (n, TAIL) last bytes.
        lengths: (n,) in bytes.
        content: returns the content of the file with an index, as a buffer. A JPEG whose end is not among its last
            bytes is searched for it. None: such a JPEG is suspicious.
    """
    jpeg = _of(heads, JPEG) & ((tails[:, :-1] == 0xFF) & (tails[:, 1:] == 0xD9)).any(1)
    png = _of(heads, PNG) & _begins(tails[:, -8:], b"IEND")
    webp = _of(heads, WEBP) & (_uint32(heads[:, 4:8]) + 8 <= lengths)
    suspected: Suspects = ~(jpeg | png | webp | _of(heads, JPEG_2000)) | (lengths < HEAD + TAIL)
    if content is not None:
        for place in np.flatnonzero(suspected & _of(heads, JPEG) & (lengths >= HEAD + TAIL)).tolist():
            suspected[place] = not has_end(memoryview(content(place)))
    return suspected


def too_large(shapes: NDArray[np.int64]) -> Suspects:
    """Return which images (n,) have more than MAX_PIXELS, given their heights and widths (n, 2)."""
    larger: Suspects = shapes.astype(np.int64).prod(1) > MAX_PIXELS
    return larger


def suspects_among(read: Sequence["TensorListCPU"], files: int) -> Suspects:
    """Return which samples (n,) have a suspicious or too large file, in a batch that DALI has read.

    Args:
        read: outputs of `dali_ops.reading_graph`.
        files: number of files per sample.
    """
    shapes, lengths, heads, tails = ([part.as_array() for part in read[i * files :][:files]] for i in (1, 2, 3, 4))
    contents = [lambda place, content=each: np.asarray(content[place]) for each in read[:files]]
    screened = map(suspicious, heads, tails, [length[:, 0] for length in lengths], contents)
    found: Suspects = np.any([*screened, *(too_large(shape[:, :2]) for shape in shapes)], 0)
    return found


def suspects(files: Sequence[Any] | NDArray[Any], are_paths: bool) -> Suspects:
    """Return which files (n,) are suspicious, without DALI.

    Args:
        files: uint8 each: contents; or absolute paths, which NULs may follow, and of which those in object stores are
            passed over.
        are_paths: which of the two.
    """
    heads, tails = np.zeros((len(files), HEAD), np.uint8), np.zeros((len(files), TAIL), np.uint8)
    lengths = np.zeros(len(files), np.int64)
    passed = np.zeros(len(files), np.bool_)
    for place, file in enumerate(files):
        if not are_paths:
            head, tail, lengths[place] = file[:HEAD].tobytes(), file[-TAIL:].tobytes(), len(file)
        elif file[:1] != ord("/"):
            passed[place] = True
            continue
        else:
            head, tail, lengths[place] = _ends(file.tobytes().rstrip(b"\0"))
        heads[place, : len(head)] = np.frombuffer(head, np.uint8)
        tails[place, TAIL - len(tail) :] = np.frombuffer(tail, np.uint8)
    return suspicious(heads, tails, lengths, None if are_paths else files.__getitem__) & ~passed


def _ends(path: bytes) -> tuple[bytes, bytes, int]:
    """Return the first and last bytes and the length, or nothing if there is no such file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b"", b"", 0
    try:
        length = os.fstat(file).st_size
        return os.pread(file, HEAD, 0), os.pread(file, TAIL, max(0, length - TAIL)), length
    except OSError:
        return b"", b"", 0
    finally:
        os.close(file)


def _of(heads: Bytes, format: Format) -> Suspects:
    found: Suspects = np.any([_begins(heads, magic) for magic in format.magics], 0)
    return found


def _begins(rows: Bytes, magic: bytes) -> Suspects:
    same: Suspects = (rows[:, : len(magic)] == np.frombuffer(magic, np.uint8)).all(1)
    return same


def _uint32(rows: Bytes) -> NDArray[np.int64]:
    return np.ascontiguousarray(rows).view("<u4")[:, 0].astype(np.int64)
