"""Asks DALI and Pillow about image files: the code of `raydali verify` that runs in child processes.

    plain, JPEG    DALI decodes it, Pillow at an eighth of its size; if these differ, Pillow decodes it as a whole
    plain, other   DALI and Pillow decode it
    not plain      Pillow decodes it, as for training (data/tasks/plain_images.py)

Pillow's view decides whether a file is broken, as in a run: what DALI refuses and Pillow decodes is handed to Pillow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raydali.data.tasks.pillow import decoded_pixels, opened, turned
from raydali.data.tasks.plain_images import HEAD, JPEG, format_of, plain_shape
from raydali.errors import DataError
from raydali.host.child import take_output

MOST_DIFFERENCE = 1.0
"""The largest mean difference of 8-bit values between DALI and Pillow on the CPU. It is 0 for all known kinds."""
_AT_EIGHTH = 8.0
"""The mean difference between an eighth of a JPEG and the means of its blocks from which it is decoded as a whole."""
_PIXELS_AT_ONCE = 1 << 25
_BLOCK = 8

Pixels = NDArray[np.uint8]


@dataclass
class Seen:
    """The findings of the decoders about a file.

    Attributes:
        shape: height and width of the upright image; None if it is broken.
        error: why it is broken.
        for_pillow: whether the DALI loader hands it to Pillow.
        transparent: whether it has transparent pixels.
        printed: what the decoders wrote to the terminal.
    """

    shape: tuple[int, int] | None = None
    error: Exception | None = None
    for_pillow: bool = False
    transparent: bool = False
    printed: str = ""


def ask_decoders(files: Sequence[bytes]) -> list[Seen]:
    """Have DALI and Pillow decode the contents of files. MemoryError is raised; other errors are in the results."""
    seen = [Seen() for _ in files]
    plain = [place for place, data in enumerate(files) if plain_shape(memoryview(data)) is not None]
    by_dali: dict[int, Pixels | str] = {}
    take_output()
    for group in _groups(files, plain):
        images = _by_dali([files[place] for place in group])
        by_dali.update(zip(group, images, strict=True))
        if (printed := take_output()) and len(group) == 1:
            seen[group[0]].printed = printed
        elif printed:  # by which one?
            for place in group:
                _by_dali([files[place]])
                seen[place].printed = take_output()
        for place in group:
            _ask_pillow(seen[place], files[place], by_dali.pop(place))
    for place in sorted({*range(len(files))} - {*plain}):
        _ask_pillow(seen[place], files[place], "not plain")
    return seen


def _by_dali(files: Sequence[bytes]) -> Sequence[Pixels | str]:
    from raydali.data.tasks.dali_trial import decoded_files

    return decoded_files(files)


def _groups(files: Sequence[bytes], places: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places in parts of limited memory."""
    group: list[int] = []
    pixels = 0
    for place in places:
        height, width = plain_shape(memoryview(files[place])) or (0, 0)
        if group and pixels + height * width > _PIXELS_AT_ONCE:
            yield group
            group, pixels = [], 0
        group.append(place)
        pixels += height * width
    if group:
        yield group


def _ask_pillow(seen: Seen, data: bytes, by_dali: Pixels | str) -> None:
    try:
        seen.for_pillow = isinstance(by_dali, str)
        if isinstance(by_dali, str) or not _alike_at_eighth(data, by_dali):
            pixels = decoded_pixels(data)
            seen.shape = pixels.shape[0], pixels.shape[1]
            if not isinstance(by_dali, str):
                _compare(by_dali, pixels)
        else:
            seen.shape = by_dali.shape[0], by_dali.shape[1]
        if format_of(data[:HEAD]) is not JPEG:
            seen.transparent = _is_transparent(data)
    except MemoryError:
        raise
    except Exception as error:
        seen.error = error
    seen.printed += take_output()


def _compare(by_dali: Pixels, by_pillow: Pixels) -> None:
    if by_dali.shape != by_pillow.shape:
        sizes = " and ".join(f"{each.shape[1]}x{each.shape[0]}" for each in (by_dali, by_pillow))
        raise DataError(f"DALI and Pillow see it differently: {sizes} pixels")
    difference = float(np.abs(by_dali.astype(np.int16) - by_pillow).mean())
    if difference > MOST_DIFFERENCE:
        raise DataError(f"DALI and Pillow see it differently: by {difference:.1f} of 255, at most {MOST_DIFFERENCE:g}")


def _alike_at_eighth(data: bytes, by_dali: Pixels) -> bool:
    """Return whether Pillow sees a JPEG as DALI does, at an eighth of its size; False for other formats.

    Pillow then decodes all of the file's bits, but a 64th of its pixels. Only some of the blocks are compared.
    """
    if format_of(data[:HEAD]) is not JPEG:
        return False
    image = opened(data)
    image.draft(None, (1, 1))
    image.load()
    small = np.asarray(turned(image.convert("RGB"), image)).astype(np.float32)
    (height, width, _), (rows, columns) = by_dali.shape, (length // _BLOCK for length in by_dali.shape[:2])
    if small.shape[:2] != (-(-height // _BLOCK), -(-width // _BLOCK)) or not rows or not columns:
        return False
    blocks = by_dali[: rows * _BLOCK, : columns * _BLOCK].reshape(rows, _BLOCK, columns, _BLOCK, 3)
    some = np.ix_(*(np.unique(np.linspace(0, length - 1, _BLOCK).astype(int)) for length in (rows, columns)))
    means = blocks[some[0], :, some[1]].mean((2, 3), dtype=np.float32)
    return bool(np.abs(means - small[some]).mean() <= _AT_EIGHTH)


def _is_transparent(data: bytes) -> bool:
    image = opened(data)
    if not image.has_transparency_data:
        return False
    if image.mode.startswith("I"):  # Pillow cannot convert these; one grey value is transparent
        return True
    return bool(np.asarray(image.convert("RGBA").getchannel("A")).min() < 255)
