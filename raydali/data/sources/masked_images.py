"""Images with masks, whose values are classes, for segmentation: two folders, lists, Pascal VOC, Cityscapes, ADE20K.

    DIR/train/images/a.jpg      DIR/train/masks/a.png         and val/: the same path in two folders, any extensions
    train.csv                   lines image,mask; the validation images in a list of their own
    VOC2012/                    JPEGImages/, SegmentationClass/, ImageSets/Segmentation/{train,val}.txt
    cityscapes/                 leftImg8bit/{train,val}/CITY/, gtFine/{train,val}/CITY/
    ADEChallengeData2016/       images/{training,validation}/, annotations/{training,validation}/

A mask is a grey image of 8 or 16 bits, or has a palette, whose numbers count, not its colours. `lookup` maps its values
to classes 0, 1, ...; IGNORED stands for pixels that count for nothing.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from posixpath import basename
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.file_list import is_list
from raydali.data.sources.files import Files, absolute, digest
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.list_lines import read_lines
from raydali.data.sources.listing import entries_or_none, list_tree
from raydali.errors import DataError, UsageError
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from PIL import Image

IGNORED = 255
"""The value in the masks of batches of pixels that do not count."""
MOST_CLASSES = 254
_UNKNOWN = 254
"""In a lookup: the value is neither a class nor ignored."""
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
        """Return the classes (height, width) of an image's pixels, and IGNORED.

        Raises:
            DataError: the mask has colours, a value that is no class, or no pixel that counts.
            Exception: it cannot be read or decoded.
        """
        values = mask_values(self.targets.read(id), self.targets.path(id))
        mask = self.lookup.take(values)
        path = self.targets.path(id)
        if (mask == _UNKNOWN).any():
            unknown = int(values[mask == _UNKNOWN][0])
            raise DataError(
                f"{path} has the value {unknown}, which is none of {plural(len(self.classes), 'class')} from 0: "
                "raise --classes, or name it with --ignore-index"
            )
        if (mask == IGNORED).all():
            raise DataError(f"{path} has no pixel that counts, as all are ignored: leave it out by --exclude")
        return mask

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
            "palette; convert its colours"
        )
    values = np.asarray(image, np.uint8 if image.mode == "1" else None)
    if values.min() < 0 or values.max() >= 1 << 16:
        raise DataError(f"{path} has values beyond 16 bits: save classes from 0 on")
    return values


def _opened(content: bytes, path: str) -> "Image.Image":
    from PIL import Image

    if not content:
        raise DataError(f"{path} is empty: a mask is an image")
    return Image.open(io.BytesIO(content))


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
    root: str | None = None,
) -> list[MaskedImages]:
    """Index the training and the validation images with their masks.

    Args:
        data: a folder or URI in one of the layouts above, or a list.
        val_data: the list of the validation images, if `data` is a list.
        images: the name of the folder of images in train/ and val/.
        masks: that of the masks.
        classes: their number, or a file with a name in each line. None: those of the layout, or of the palette of the
            first mask, if it has fewer than 256 colours.
        ignored: the value of pixels that do not count; of 16 bits also 65535.
        root: the folder of relative paths in a list. None: the list's.

    Raises:
        UsageError: they cannot be indexed, or their classes are not known.
    """
    if is_list(data) != (val_data is not None):
        raise UsageError(
            f"--data {data}: give a list in both --data and --val-data, or only --data, a folder with both sets"
        )
    if val_data is not None:
        pairs = [_listed(absolute(each), root) for each in (data, val_data)]
    elif (found := _in_layout(absolute(data), ignored)) is not None:
        pairs, usual, lookup = found
        return [_with_classes(each, _named(classes, usual), lookup) for each in pairs]
    else:
        pairs = [ImagePairs.scan(f"{absolute(data)}/{split}", images, masks) for split in ("train", "val")]
    names = _names(classes, pairs[0])
    lookup = lookup_of(range(len(names)), [ignored, 65535])
    return [_with_classes(each, names, lookup) for each in pairs]


def _with_classes(pairs: ImagePairs, names: Sequence[str], lookup: Lookup) -> MaskedImages:
    return MaskedImages(pairs.inputs, pairs.targets, pairs.skipped, classes=tuple(names), lookup=lookup)


def _listed(path: str, root: str | None) -> ImagePairs:
    """Index the lines image,mask of a list."""
    folder = path.rpartition("/")[0] if root is None else absolute(root)
    lines = read_lines(path, folder)
    masks = [*lines.names]
    if len(lines.numbers) < 1 or any("." not in basename(mask) for mask in masks):
        raise UsageError(f"{path} has lines without a mask: write a line image,mask for each image")
    images = Files(*lines.paths.packed())
    return ImagePairs(images, Files.from_list(folder, [masks[index] for index in lines.labels]))


def _in_layout(root: str, ignored: int) -> "tuple[list[ImagePairs], tuple[str, ...], Lookup] | None":
    """Index a folder that is laid out as a public data set is unpacked; None if it is not."""
    folders = {entry.name for entry in entries_or_none(root) if entry.is_folder}
    if {"JPEGImages", "SegmentationClass"} <= folders:
        return _voc(root), VOC, lookup_of(range(len(VOC)), [ignored])
    if {"leftImg8bit", "gtFine"} <= folders:
        return _cityscapes(root), tuple(CITYSCAPES.values()), lookup_of(CITYSCAPES, others=IGNORED)
    if {"images", "annotations"} <= folders:
        splits = "training", "validation"
        below = [ImagePairs.scan(root, f"images/{split}", f"annotations/{split}") for split in splits]
        names = tuple(map(str, range(1, _ADE20K + 1)))
        return below, names, lookup_of(range(1, _ADE20K + 1), others=IGNORED)
    return None


def _voc(root: str) -> list[ImagePairs]:
    pairs = []
    for split in ("train", "val"):
        path = f"{root}/ImageSets/Segmentation/{split}.txt"
        try:
            names = storage.read(path).decode().split()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {storage.reason(error)}; give VOC as it is unpacked") from error
        images = Files.from_list(root, [f"JPEGImages/{name}.jpg" for name in names])
        pairs.append(ImagePairs(images, Files.from_list(root, [f"SegmentationClass/{name}.png" for name in names])))
    return pairs


def _cityscapes(root: str) -> list[ImagePairs]:
    pairs = []
    for split in ("train", "val"):
        stems = [
            f"{city}/{name.removesuffix('_leftImg8bit.png')}".lstrip("/")
            for city, names in sorted(list_tree(f"{root}/leftImg8bit/{split}", of="images").items())
            for name in sorted(names)
            if name.endswith("_leftImg8bit.png")
        ]
        if not stems:
            raise UsageError(f"{root}/leftImg8bit/{split} has no *_leftImg8bit.png: give Cityscapes as it is unpacked")
        images = Files.from_list(root, [f"leftImg8bit/{split}/{stem}_leftImg8bit.png" for stem in stems])
        masks = Files.from_list(root, [f"gtFine/{split}/{stem}_gtFine_labelIds.png" for stem in stems])
        pairs.append(ImagePairs(images, masks))
    return pairs


def _names(classes: str | None, pairs: ImagePairs) -> Sequence[str]:
    """Return the names of the classes: as given, or as many numbers as the palette of the first mask has colours."""
    if classes is not None:
        return _named(classes, ())
    path = pairs.targets.path(0)
    try:
        image = _opened(pairs.targets.read(0), path)
    except Exception as error:
        raise UsageError(f"{path} cannot be read: {error}; repair it, or leave it out by --exclude") from error
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
