"""Images with masks, whose values are classes, for segmentation: two folders, lists, Pascal VOC, Cityscapes, ADE20K.

    DIR/train/images/a.jpg      DIR/train/masks/a.png         and val/: the same path in two folders, any extensions
    DIR/images/a.jpg            DIR/masks/a.png               a share of them is split off
    train.csv                   lines image,mask; the validation images in a list of their own, or split off
    VOC2012/                    JPEGImages/, SegmentationClass/, ImageSets/Segmentation/{train,val}.txt
    cityscapes/                 leftImg8bit/{train,val}/CITY/, gtFine/{train,val}/CITY/
    ADEChallengeData2016/       images/{training,validation}/, annotations/{training,validation}/

A mask is a grey image of 8 or 16 bits, or has a palette, whose numbers count, not its colours. `lookup` maps its values
to classes 0, 1, ...; IGNORED stands for pixels that count for nothing.
"""

import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from posixpath import basename
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.file_list import is_list
from raydali.data.index.files import Files, absolute, digest
from raydali.data.index.image_pairs import ImagePairs, in_splits
from raydali.data.index.list_lines import Wanted, read_lines
from raydali.data.index.listing import entries_or_none, list_tree
from raydali.data.index.mask_sample import MaskSample
from raydali.data.index.validation_set import Split, split
from raydali.data.read import storage
from raydali.data.stream.counter_rng import keyed
from raydali.errors import DataError, UsageError
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from PIL import Image

IGNORED = 255
"""The value in the masks of batches of pixels that do not count."""
MOST_CLASSES = 254
_UNKNOWN = 254
"""In a lookup: the value is neither a class nor ignored."""
_SALT = 0x3A5C
"""Separates the random numbers that choose the sample of masks from others."""
MOST_MASKS, MOST_PIXELS = 1000, 1 << 28
"""Limits of the sample of masks."""
_THREADS, _MASKS_AT_ONCE = 16, 64
_TRIED = 8
VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CITYSCAPES = {
    **{7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light"},
    **{20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car"},
    **{27: "truck", 28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle"},
}
"""The 19 classes of Cityscapes' benchmark by their ids in *_labelIds.png."""
_ADE20K = 150
Lookup = NDArray[np.uint8]
"""The class of each value of a mask, (65536,)."""


@dataclass(frozen=True, eq=False)
class MaskedImages(ImagePairs):
    """N images and their masks by id 0..N-1, sorted by path, or in the order of a list.

    Attributes:
        classes: their names, in order.
        lookup: the class of each value of a mask, IGNORED, or _UNKNOWN.
    """

    classes: tuple[str, ...] = ()
    lookup: Lookup = field(default_factory=lambda: np.zeros(0, np.uint8))

    def mask(self, id: int) -> NDArray[np.uint8]:
        """Read the mask of an image, see `mask_in`.

        Raises:
            OSError: it cannot be read; names it.
        """
        return self.mask_in(id, self.targets.read(id))

    def mask_in(self, id: int, content: "bytes | NDArray[np.uint8]") -> NDArray[np.uint8]:
        """Return the classes (height, width) of an image's pixels, and IGNORED, from the content of its mask's file.

        Raises:
            DataError: the mask has colours, a value that is no class, or no pixel that counts.
            Exception: it cannot be decoded.
        """
        path = self.targets.path(id)
        values = mask_values(bytes(content), path)
        mask = self.lookup.take(values)
        if (mask == _UNKNOWN).any():
            unknown = int(values[mask == _UNKNOWN][0])
            raise DataError(
                f"{path} has the value {unknown}, which is none of {plural(len(self.classes), 'class')} from 0: "
                "raise --classes, or name it with --ignore-index or --mask-values"
            )
        if (mask == IGNORED).all():
            raise DataError(f"{path} has no pixel that counts, as all are ignored: leave it out by --exclude")
        return mask

    @cached_property
    def sample(self) -> MaskSample:
        """The counts of some masks, always the same ones; the loaders find those that cannot be read."""
        order = np.argsort(keyed(_SALT, np.arange(len(self))))[:MOST_MASKS].tolist()
        sample = MaskSample(is_whole=len(order) == len(self))
        with ThreadPoolExecutor(_THREADS) as threads:
            while order and sample.values.sum() < MOST_PIXELS:
                for mask in filter(None, threads.map(self._read, order[:_MASKS_AT_ONCE])):
                    sample.add(*mask, self.lookup, _UNKNOWN)
                order = order[_MASKS_AT_ONCE:]
        sample.is_whole &= not order
        return sample

    def _read(self, id: int) -> tuple[NDArray[Any], bool] | None:
        """Return the values of a mask, and whether it is a JPEG; None if it is broken."""
        try:
            content = self.targets.read(id)
            return mask_values(content, self.targets.path(id)), content.startswith(b"\xff\xd8")
        except Exception:
            return None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the relative paths, the classes and what masks mean."""
        return digest(super().fingerprint.encode(), "\n".join(self.classes).encode(), self.lookup.data)


def mask_values(content: bytes, path: str) -> NDArray[Any]:
    """Return the values (height, width) of a mask in a file's content, integers: of a palette its numbers.

    Raises:
        DataError: it has colours, or numbers that are no whole ones.
        Exception: Pillow cannot decode it.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(_opened(content, path))
    if image.mode not in ("1", "L", "P", "I;16", "I;16B", "I"):
        raise DataError(
            f"{path} is of Pillow's mode {image.mode}: a mask holds classes as grey values of 8 or 16 bits, or by a "
            "palette; convert it"
        )
    values = np.asarray(image, np.uint8 if image.mode == "1" else None)
    if values.min() < 0 or values.max() >= 1 << 16:
        raise DataError(f"{path} has values beyond 16 bits: save classes from 0 on")
    return values


def _opened(content: bytes, path: str) -> "Image.Image":
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise DataError(f"{path} is empty: a mask is an image")
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:  # its text has an address in memory
        raise DataError(f"{path} is no image, it begins with {content[:8]!r}: a mask is an image") from None


def lookup_of(values: Iterable[int], ignored: Iterable[int] = (), *, others: int = _UNKNOWN) -> Lookup:
    """Return the lookup in which these values are classes 0, 1, ...; `others`: what all other values are."""
    lookup = np.full(1 << 16, others, np.uint8)
    for index, value in enumerate(values):
        lookup[value] = index
    lookup[[*ignored]] = IGNORED
    return lookup


def train_and_val(
    data: str,
    val_data: str | None = None,
    *,
    images: str = "images",
    masks: str = "masks",
    classes: str | None = None,
    ignored: int = IGNORED,
    values: Sequence[int] | None = None,
    root: str | None = None,
    val_fraction: float | None = None,
    fold: str | None = None,
    val_group: str | None = None,
) -> list[MaskedImages]:
    """Index the training and the validation images with their masks.

    Args:
        data: a folder or URI in one of the layouts above, or a list.
        val_data: the validation images, a list or a folder with images/ and masks/, if `data` has only training images.
        images: the name of the folder of images.
        masks: the name of the folder of masks.
        classes: their number, or a file with a name in each line. None: the classes of the layout, or of the palette
            of the first mask, if it has fewer than 256 colours.
        ignored: the value of pixels that do not count; of 16 bits also 65535. `values` comes first.
        values: the values of the classes in masks, in their order. None: 0, 1, ..., or the values of the layout.
        root: the folder of relative paths in a list. None: the list's.
        val_fraction: the share that validates, if `data` is a list, or has images/ and masks/ itself, see `Split`.
            Default: 0.1 of such a folder.
        fold: K/N, of which the K-th of N folds validates.
        val_group: which images stay together.

    Raises:
        UsageError: they cannot be indexed, or their classes are not known.
    """
    usual, lookup = tuple[str, ...](), None
    asked = Split(val_fraction, fold, val_group)
    if val_data is not None:
        if asked:
            raise UsageError(f"{asked} and --val-data {val_data} exclude each other: give one")
        pairs = [_indexed(path, root, images, masks) for path in (data, val_data)]
    elif is_list(data):
        if not asked:
            raise UsageError(f"--data {data}: give a list in both --data and --val-data, or --val-fraction 0.1")
        wanted = Wanted(("1",)) if asked.column else None  # columns of groups may follow the masks'
        pairs = [*split(_indexed(data, root, wanted=wanted), asked, data, root)]
    elif not asked and (layout := _in_layout(absolute(data), ignored)) is not None:
        pairs, usual, lookup = layout
    else:
        pairs = in_splits(data, ("train", "val"), images, masks, val_fraction, fold, val_group)
    if classes is not None or usual:
        names = _named(classes, usual)
    else:
        names = [*map(str, values)] if values is not None else _of_palette(pairs[0])
    if values is not None:
        if len(values) != len(names) or not {*values} <= {*range(1 << 16)}:
            raise UsageError(f"--mask-values needs {plural(len(names), 'value')} from 0 to 65535, not {values}")
        lookup = lookup_of(values, {ignored, 65535} - {*values})
    elif lookup is None:
        lookup = lookup_of(range(len(names)), [ignored, 65535])
    made = partial(MaskedImages, classes=tuple(names), lookup=lookup)
    return [made(part.inputs, part.targets, part.skipped) for part in pairs]


def _indexed(
    path: str, root: str | None, images: str = "", masks: str = "", wanted: Wanted | None = None
) -> ImagePairs:
    """Index the lines image,mask of a list, or a folder with images and masks."""
    if not is_list(path):
        return ImagePairs.scan(path, images, masks)
    path = absolute(path)
    folder = path.rpartition("/")[0] if root is None else absolute(root)
    lines = read_lines(path, folder, wanted)
    names = [*lines.names]
    if len(lines.numbers) < 1 or any("." not in basename(mask) for mask in names):
        raise UsageError(f"{path} has lines without a mask: write a line image,mask for each image")
    return ImagePairs(Files(*lines.paths.packed()), Files.from_list(folder, [names[index] for index in lines.labels]))


def _in_layout(root: str, ignored: int) -> "tuple[list[ImagePairs], tuple[str, ...], Lookup] | None":
    """Index a folder that is laid out as a public data set is unpacked; None if it is not."""
    folders, parts = {entry.name for entry in entries_or_none(root) if entry.is_folder}, ("train", "val")
    if {"JPEGImages", "SegmentationClass"} <= folders:
        return [_voc(root, part) for part in parts], VOC, lookup_of(range(len(VOC)), [ignored])
    if {"leftImg8bit", "gtFine"} <= folders:
        lookup = lookup_of(CITYSCAPES, [ignored], others=IGNORED)
        return [_cityscapes(root, part) for part in parts], tuple(CITYSCAPES.values()), lookup
    if {"images", "annotations"} <= folders:
        parts = "training", "validation"
        pairs = [ImagePairs.scan(root, f"images/{part}", f"annotations/{part}") for part in parts]
        names = tuple(map(str, range(1, _ADE20K + 1)))
        return pairs, names, lookup_of(range(1, _ADE20K + 1), [ignored], others=IGNORED)
    return None


def _voc(root: str, part: str) -> ImagePairs:
    path = f"{root}/ImageSets/Segmentation/{part}.txt"
    try:
        names = storage.read(path).decode().split()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {storage.reason(error)}; give VOC as it is unpacked") from error
    images = Files.from_list(root, [f"JPEGImages/{name}.jpg" for name in names])
    return ImagePairs(images, Files.from_list(root, [f"SegmentationClass/{name}.png" for name in names]))


def _cityscapes(root: str, part: str) -> ImagePairs:
    stems = [
        f"{city}/{name.removesuffix('_leftImg8bit.png')}".lstrip("/")
        for city, names in sorted(list_tree(f"{root}/leftImg8bit/{part}", of="images").items())
        for name in sorted(names)
        if name.endswith("_leftImg8bit.png")
    ]
    if not stems:
        raise UsageError(f"{root}/leftImg8bit/{part} has no *_leftImg8bit.png: give Cityscapes as it is unpacked")
    images = Files.from_list(root, [f"leftImg8bit/{part}/{stem}_leftImg8bit.png" for stem in stems])
    return ImagePairs(images, Files.from_list(root, [f"gtFine/{part}/{stem}_gtFine_labelIds.png" for stem in stems]))


def _of_palette(pairs: ImagePairs) -> Sequence[str]:
    """Return as many numbers, as names of classes, as the palette of the first mask that can be read has colours."""
    path = pairs.targets.path(0)
    for id in range(min(len(pairs), _TRIED)):
        with suppress(Exception):
            image = _opened(pairs.targets.read(id), path)
            break
    else:
        raise UsageError(f"{path} and others cannot be read: give --classes; `raydali verify` lists broken masks")
    colours = len(image.palette.palette) // 3 if image.palette is not None else 0
    if not 0 < colours <= MOST_CLASSES:
        raise UsageError(f"{path} does not say how many classes there are: give --classes, a number or a file of names")
    return [*map(str, range(colours))]


def _named(classes: str | None, usual: Sequence[str]) -> Sequence[str]:
    """Return the names that are given as a number or a file; `usual`: the names of the layout, if there are any."""
    if classes is None:
        return usual
    if classes.isdecimal():
        names = [*map(str, range(int(classes)))]
    else:
        try:
            text = storage.read(absolute(classes)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--classes {classes} is neither a number nor a file of names: {error}") from error
        names = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(names) <= MOST_CLASSES or len({*names}) < len(names):
        twice = summarize(sorted({name for name in names if names.count(name) > 1}), show=repr)
        what = f"has {twice} more than once" if twice else f"are {len(names)} classes, not 1 to {MOST_CLASSES}"
        raise UsageError(f"--classes {classes} {what}: correct it")
    if usual and len(names) != len(usual):
        raise UsageError(f"--classes {classes} are {len(names)} names, but the data set has {len(usual)} classes")
    return names
