"""Which image files are worth a closer look: by their first and last bytes, their sizes and shapes, a batch at once.

A JPEG that was cut off decodes as long as the window lies above the cut, so an error cannot be waited for: whether a
sample is broken must not depend on where an epoch's crop lies. Whoever is suspected here is read as a whole, once
(quarantine.py); most are sound: JPEGs with something behind their end, formats that are not known here.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD, TAIL = 12, 16
"""Bytes that are looked at."""
MOST_PIXELS = 178_956_970
"""Of an image; Pillow refuses what has more as a decompression bomb (twice PIL.Image.MAX_IMAGE_PIXELS)."""

# Their ends tell nothing: TIFF, JPEG 2000, and PNM of all kinds.
_OTHERS = (b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51", *(b"P%d" % kind for kind in range(1, 7)))

Bytes = NDArray[np.uint8]
Suspects = NDArray[np.bool_]


def suspects(heads: Bytes, tails: Bytes, lengths: NDArray[np.int64]) -> Suspects:
    """Files (n,) that are too short, cut off or of an unknown kind, as far as their ends tell.

    Args:
        heads: (n, HEAD) first bytes.
        tails: (n, TAIL) last bytes.
        lengths: (n,) in bytes.
    """
    jpeg = _begins(heads, b"\xff\xd8\xff")
    ended = ((tails[:, :-1] == 0xFF) & (tails[:, 1:] == 0xD9)).any(1)
    png = _begins(heads, b"\x89PNG") & _begins(tails[:, -8:], b"IEND")
    webp = _begins(heads, b"RIFF") & (_uint32(heads[:, 4:8]) + 8 <= lengths)
    bmp = _begins(heads, b"BM") & (_uint32(heads[:, 2:6]) <= lengths)
    others = np.any([_begins(heads, magic) for magic in _OTHERS], 0)
    suspected: Suspects = ~((jpeg & ended) | png | webp | bmp | others) | (lengths < HEAD + TAIL)
    return suspected


def too_large(shapes: NDArray[np.int64]) -> Suspects:
    """Images (n,) of more than MOST_PIXELS, of their heights and widths (n, 2)."""
    larger: Suspects = shapes.astype(np.int64).prod(1) > MOST_PIXELS
    return larger


def look(files: Sequence[Any] | NDArray[Any], are_paths: bool) -> Suspects:
    """Suspects (n,) among files, without DALI.

    Args:
        files: uint8 each: contents; or absolute paths, of which those in object stores are passed over.
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
            head, tail, lengths[place] = _ends(file.tobytes())
        heads[place, : len(head)] = np.frombuffer(head, np.uint8)
        tails[place, TAIL - len(tail) :] = np.frombuffer(tail, np.uint8)
    return suspects(heads, tails, lengths) & ~passed


def _ends(path: bytes) -> tuple[bytes, bytes, int]:
    """First and last bytes, and length; nothing where there is no such file."""
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


def _begins(rows: Bytes, magic: bytes) -> Suspects:
    same: Suspects = (rows[:, : len(magic)] == np.frombuffer(magic, np.uint8)).all(1)
    return same


def _uint32(rows: Bytes) -> NDArray[np.int64]:
    return np.ascontiguousarray(rows).view("<u4")[:, 0].astype(np.int64)
