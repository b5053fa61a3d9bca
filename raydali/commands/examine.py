"""Examines samples: the code of `raydali verify` that runs in child processes. Videos are decoded by FFmpeg.

    plain, JPEG    DALI decodes it, Pillow at an eighth of its size; if these differ, Pillow decodes it as a whole
    plain, other   DALI and Pillow decode it
    not plain      Pillow decodes it, as for training (data/decode/decoder_choice.py)

Pillow's view decides whether a file is broken, as in a run: what DALI refuses and Pillow decodes is handed to Pillow.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.broken.quarantine import BrokenSample, describe_error, refusal, why_broken
from raydali.data.decode.decoder_choice import HEAD, JPEG, format_of, plain_shape
from raydali.data.decode.pillow import decoded_pixels, opened, turned
from raydali.data.index.coco import Coco
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.masked_images import MaskedImages
from raydali.data.index.source import Source
from raydali.data.tasks.class_check import is_turned
from raydali.errors import DataError
from raydali.host.child import take_output

MOST_DIFFERENCE = 1.0
"""The largest mean difference of 8-bit values between DALI and Pillow on the CPU. It is 0 for all known kinds."""
_AT_EIGHTH = 8.0
"""The mean difference between an eighth of a JPEG and the means of its blocks from which it is decoded as a whole."""
_PIXELS_AT_ONCE = 1 << 25
_BLOCK = 8
_FRAMES_AT_ONCE = 256

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


@dataclass
class Found:
    """Findings about some samples.

    Attributes:
        broken: samples that cannot be read, by id.
        transparent: number of other samples with transparent pixels.
        for_pillow: number of other samples that the DALI loader hands to Pillow.
        printed: what decoders wrote to the terminal, by path.
    """

    broken: list[BrokenSample]
    transparent: int = 0
    for_pillow: int = 0
    printed: dict[str, str] = field(default_factory=dict)

    def add(self, more: "Found") -> int:
        """Add the findings about other samples; return the number of broken ones so far."""
        self.broken += more.broken
        self.transparent += more.transparent
        self.for_pillow += more.for_pillow
        self.printed |= more.printed
        return len(self.broken)


def killed(source: Source, id: int, reason: str) -> Found:
    """Return the finding about a sample that ended its process, or on which it did not come to an end."""
    return Found([BrokenSample(id, source.path(id), reason)])


def examine_images(source: Any, ids: Sequence[int]) -> Found:  # noqa: ANN401 (of each kind)
    """Examine samples of one or two image files: read all of them, and ask the decoders."""
    result, of_files = Found([]), {}
    contents: list[bytes] = []

    def read(id: int) -> None:
        data = [files.read(id) for files in _files(source)]
        of_files[id] = range(len(contents), len(contents) + len(data))
        contents.extend(data)

    errors = {id: refusal(partial(read, id)) for id in ids}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about palettes with transparency and large images
        seen = ask_decoders(contents)
    for id in ids:
        path, of_id = source.path(id), [seen[place] for place in of_files.get(id, ())]
        error = errors[id] or refusal(partial(_check, source, id, of_id))
        if error is not None:
            reason = describe_error(error)
            for prefix in (f"{path} cannot be read: ", f"{path}: "):
                reason = reason.removeprefix(prefix)
            result.broken.append(BrokenSample(id, path, reason))
        else:
            result.transparent += any(image.transparent for image in of_id)
            result.for_pillow += any(image.for_pillow for image in of_id)
        if printed := "".join(image.printed for image in of_id):
            result.printed[path] = printed
    return result


def _files(source: Any) -> Sequence[Any]:  # noqa: ANN401 (of each kind)
    """Return the sources of a sample's image files; masks are no images."""
    if isinstance(source, MaskedImages):
        return (source.inputs,)
    return (source.inputs, source.targets) if isinstance(source, ImagePairs) else (source,)


def _check(source: Any, id: int, seen: Sequence[Seen]) -> None:  # noqa: ANN401 (of each kind)
    """Raise why a sample cannot be trained on: a file is broken, or differs in size from its pair, mask or boxes."""
    for files, image in zip(_files(source), seen, strict=True):
        if image.error is not None:
            raise DataError(f"{files.path(id)}: {image.error}") if len(seen) > 1 else image.error
    sizes = [f"{image.shape[1]}x{image.shape[0]}" for image in seen if image.shape is not None]
    if len({*sizes}) > 1:
        raise DataError(f"{' and '.join(sorted(sizes))} pixels: both images of a pair must have the same size")
    if isinstance(source, ImagePairs) and is_turned(source, id):
        raise DataError("EXIF turns one of both files, and no size shows whether they match: store both upright")
    if isinstance(source, Coco):
        height, width = source.sizes[id].tolist()
        if height and width and seen[0].shape != (height, width):
            raise DataError(f"{sizes[0]} pixels, but {width}x{height} in the annotations")
    if isinstance(source, MaskedImages):
        height, width = source.mask(id).shape
        if seen[0].shape != (height, width):
            raise DataError(f"{sizes[0]} pixels, but its mask {width}x{height}: give both one size")


def examine_videos(source: LabeledFiles, ids: Sequence[int]) -> Found:
    """Decode all frames of videos."""
    reasons = {id: why_broken(partial(_load_video, source, id)) for id in ids}
    broken = [(id, reason.removeprefix(f"{source.path(id)}: ")) for id, reason in reasons.items() if reason is not None]
    return Found([BrokenSample(id, source.path(id), reason) for id, reason in broken])


def _load_video(source: LabeledFiles, id: int) -> None:
    from raydali.data.video.packets import read_clip_packets, read_video_info
    from raydali.data.video.task import decoded

    path = source.path(id)
    facts = read_video_info(path)
    for first in range(0, facts.frames, _FRAMES_AT_ONCE):
        with read_clip_packets(path, facts, first, 1, min(_FRAMES_AT_ONCE, facts.frames - first)) as part:
            decoded(part, lambda _: None)


def ask_decoders(files: Sequence[bytes]) -> list[Seen]:
    """Have DALI and Pillow decode the contents of files. MemoryError is raised; other errors are in the results."""
    from raydali.data.decode.dali_trial import decoded_files

    seen = [Seen() for _ in files]
    plain = [place for place, data in enumerate(files) if plain_shape(memoryview(data)) is not None]
    by_dali: dict[int, Pixels | str] = {}
    take_output()
    for group in _groups(files, plain):
        images = decoded_files([files[place] for place in group])
        by_dali.update(zip(group, images, strict=True))
        if (printed := take_output()) and len(group) == 1:
            seen[group[0]].printed = printed
        elif printed:  # by which one?
            for place in group:
                decoded_files([files[place]])
                seen[place].printed = take_output()
        for place in group:
            _ask_pillow(seen[place], files[place], by_dali.pop(place))
    for place in sorted({*range(len(files))} - {*plain}):
        _ask_pillow(seen[place], files[place], "not plain")
    return seen


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
        sizes = " and ".join(f"{pixels.shape[1]}x{pixels.shape[0]}" for pixels in (by_dali, by_pillow))
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
