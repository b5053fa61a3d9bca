"""Checks, for all tasks, that there is something to learn each class from, before the first step.

It reads labels, some masks (`MaskedImages.sample`), and some images, for an EXIF orientation that others lack.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from raydali.data.decode.pillow import opened, orientation
from raydali.data.index.coco import Coco
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.masked_images import MaskedImages
from raydali.data.index.source import classes_of
from raydali.errors import UsageError
from raydali.text import plural, summarize

MOST_BLENDED = 0.1
"""The share of pixels at borders, with values between both sides, from which masks seem to be resized smoothly."""
_READ_FOR_EXIF, _THREADS = 100, 8


def class_warnings(source: Any) -> Iterator[str]:  # noqa: ANN401 (of any task)
    """Yield what hinders the classes, or the pairs, of a training set from being learned.

    Raises:
        UsageError: no class but one would be trained.
    """
    if isinstance(source, ImagePairs | Coco):
        yield from _turned(source)
    names, labels, noun = classes_of(source), getattr(source, "one_each", None), "sample"
    among, is_certain, numbers, background = plural(len(source), "sample"), True, "", 0
    if isinstance(source, MaskedImages):
        noun, sample, numbers = "pixel", source.sample, _numbers(source)
        counts, is_certain = sample.pixels[: len(names)], sample.is_whole or bool(numbers)
        if not sample.masks:
            return
        among = plural(sample.masks, "mask") + " looked at" * (not sample.is_whole)
        yield from _blended(source)
    elif isinstance(source, Coco):
        counts, noun, background = np.bincount(source.labels[~source.crowd] - 1, minlength=len(names)), "box", 1
    elif names and labels is not None:
        counts = np.bincount(labels, minlength=len(names))
    else:
        return
    remedy = f"give --mask-values {numbers}, which are their values" if numbers else "correct the labels"
    trained, missing = ([names[i] for i in np.flatnonzero(chosen)] for chosen in (counts > 0, counts == 0))
    if len(trained) + background < 2 and is_certain:
        if len(names) == 1 and not background:
            raise UsageError(f"{source}: {names[0]!r} is the only class, so nothing is learned: give at least two")
        alone = f"{trained[0]!r} alone" if trained else "no class"
        raise UsageError(f"{source}: {alone} would be trained, as others have no {noun} in {among}: {remedy}")
    if numbers:
        yield f"masks of {source} seem to number classes otherwise: {remedy}"
    if missing:
        seen = f"; others have {counts[counts > 0].min():,} to {counts.max():,}" if trained else ""
        without = summarize(missing, show=repr)
        yield f"{len(missing)} of {plural(len(names), 'class')} have no {noun} in {among}: {without}{seen}"


def _numbers(source: MaskedImages) -> str:
    """Return the values of masks, as an option takes them, if they seem to be classes and are not; else nothing."""
    values, classes = np.flatnonzero(source.sample.values).tolist(), len(source.classes)
    if values in ([0, 255], [0, 128, 255]) and source.lookup[255] >= classes:
        return " ".join(map(str, values))
    if not values or values[0] != 1 or classes not in values or source.lookup[classes] < classes:
        return ""
    return f"$(seq 1 {classes})"


def _blended(source: MaskedImages) -> Iterator[str]:
    """Yield why values are mixed at the borders of classes."""
    sample, remedy = source.sample, "borders become other classes: save PNG, resized by the nearest pixel"
    blended, borders = int(sample.between.sum()), max(1, sample.borders)
    if sample.jpegs:
        yield f"{sample.jpegs} of {plural(sample.masks, 'mask')} are JPEG, which is lossy; {remedy}"
    elif np.count_nonzero(sample.between) > 2 and blended > MOST_BLENDED * borders:  # thin classes have fewer values
        yield f"in {plural(sample.masks, 'mask')}, {blended / borders:.0%} of pixels at borders are blends; {remedy}"


def _turned(source: ImagePairs | Coco) -> Iterator[str]:
    ids = range(0, len(source), -(-len(source) // _READ_FOR_EXIF))
    with ThreadPoolExecutor(_THREADS) as threads:
        turned = [*compress(ids, threads.map(partial(is_turned, source), ids))]
    if turned:
        other = "boxes" if isinstance(source, Coco) else "masks or partners"
        yield (
            f"EXIF turns {len(turned)} of {plural(len(ids), 'image')} looked at, and not their {other}, such as "
            f"{source.path(turned[0])}: store them upright"
        )


def is_turned(source: Any, id: int) -> bool:  # noqa: ANN401 (ImagePairs or Coco)
    """Return whether EXIF turns an image otherwise than its mask, partner or boxes, and no size shows it."""
    files = (source.inputs, source.targets) if isinstance(source, ImagePairs) else (source,)
    try:
        images = [opened(side.read(id)) for side in files]
    except Exception:  # it is broken
        return False
    one, other = ([orientation(image) for image in images] + [1])[:2]
    is_seen = (one >= 5) != (other >= 5) and images[0].width != images[0].height
    return one != other and not is_seen
