"""Images with boxes in YOLO's folders, as Ultralytics and Roboflow have them, for detectors.

    DIR/data.yaml              names of the classes, and the folders of images: path, train, val
    DIR/images/train/a.jpg     an image
    DIR/labels/train/a.txt     its boxes: the last folder `images` of a path is `labels`; without this file it has none

A line of a label file is a box: class, centre x, centre y, width, height, in shares of the upright image. The format is
https://docs.ultralytics.com/datasets/detect/. Roboflow's exports have train/images/ and train/labels/.
"""

import logging
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.decode.decoder_choice import Shape, plain_shape
from raydali.data.decode.pillow import upright_shape
from raydali.data.index.coco import Coco
from raydali.data.index.file_rules import select_files
from raydali.data.index.files import Files, absolute
from raydali.data.index.labeled import IMAGE_EXTENSIONS
from raydali.data.index.listing import list_tree
from raydali.data.read import storage
from raydali.data.read.contents import Failed
from raydali.errors import UsageError
from raydali.text import plural, summarize

DESCRIPTION = "data.yaml"
"""The usual name of the file that describes a data set."""
_FIELDS = "class, centre x, centre y, width and height"
_HEADER = 1 << 16
"""First bytes of an image in which its size is searched, before the whole file is read."""
_FILES_AT_ONCE, _THREADS = 4096, 16
_ROUNDED = 1e-5  # more than 1, as rounded shares may be

_log = logging.getLogger(__name__)


def yolo_split(file: str, split: str) -> Coco:
    """Index the images of a split, sorted by path, and their boxes. The numbers of classes are `category_ids`.

    The sizes of images are those in their headers. Warns of images whose size cannot be read, which have no boxes
    here, and of boxes without width or height, which are left out.

    Args:
        file: the YAML file, from `files.absolute`.
        split: train or val.

    Raises:
        UsageError: a file cannot be read; the YAML file has no names, or no images; a line of a label file is no box;
            there is no box.
    """
    content, classes = _described(file)
    root, paths = _images(file, content, split)
    labels = Files.from_list(posixpath.dirname(file), [*map(_label_file, paths)])
    parts = np.array_split(np.arange(len(paths)), -(-len(paths) // _FILES_AT_ONCE))
    of_parts = [_boxes(file, classes, labels, ids) for ids in parts]
    owners, lines = (np.concatenate(arrays) for arrays in zip(*of_parts, strict=True))
    if not len(lines):
        raise UsageError(
            f"{file}: {plural(len(paths), 'image')} of {split} without boxes: write {_FIELDS} of each box of "
            f"{paths[0]} in a line of {labels.path(0)}"
        )
    with ThreadPoolExecutor(storage.CONNECTIONS if "://" in file else _THREADS) as threads:
        shapes = [*threads.map(_shape, paths)]
    sizes = np.array([shape if isinstance(shape, tuple) else (0, 0) for shape in shapes], np.int64)
    if unread := [path for path, shape in zip(paths, shapes, strict=True) if shape is None]:
        _log.warning("%s: sizes cannot be read, see `raydali verify`: %s", file, summarize(unread))

    scales = sizes[owners, ::-1]
    centres, halves = lines[:, 1:3] * scales, lines[:, 3:] * scales / 2
    boxes = np.concatenate([centres - halves, centres + halves], 1).astype(np.float32)
    kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
    if empty := {labels.path(id) for id in owners[~kept & scales.all(1)].tolist()}:
        _log.warning("%s: left out boxes without width or height, of %s", file, summarize(sorted(empty)))
    numbers = np.array(sorted(classes), np.int64)
    return Coco.from_list(
        root,
        [path.removeprefix(f"{root}/") for path in paths],
        sizes=sizes,
        image_ids=np.arange(len(paths)),
        first_boxes=np.concatenate([[0], np.bincount(owners[kept], minlength=len(paths)).cumsum()]).astype(np.int64),
        boxes=boxes[kept],
        labels=np.searchsorted(numbers, lines[kept, 0]) + 1,
        crowd=np.zeros(int(kept.sum()), np.bool_),
        classes=tuple(classes[number] for number in numbers.tolist()),
        category_ids=numbers,
        missing=tuple(id for id, shape in enumerate(shapes) if isinstance(shape, FileNotFoundError)),
    )


def _described(file: str) -> tuple[Mapping[str, Any], dict[int, str]]:
    """Return the content of a YAML file, whose values are texts, and the names of classes by number."""
    import yaml

    try:
        content = yaml.load(storage.read(file), yaml.BaseLoader)  # otherwise the names `no` and `on` were truth values
    except (OSError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or storage.reason(error)
        raise UsageError(f"{file} cannot be read: {why}; correct it, or give another one") from error
    content = content if isinstance(content, dict) else {}
    names = content.get("names")
    items = names.items() if isinstance(names, dict) else enumerate(names if isinstance(names, list) else ())
    try:
        classes = {int(number): name for number, name in items}
    except ValueError:
        classes = {}
    if not classes or not all(name and isinstance(name, str) for name in classes.values()):
        raise UsageError(f"{file} has no names of classes, or not in Ultralytics' form: write `names: [cat, dog]`")
    if content.get("nc", f"{len(classes)}") != f"{len(classes)}":
        raise UsageError(f"{file} has nc: {content['nc']} and {plural(len(classes), 'name')}: correct one of them")
    name, count = Counter(classes.values()).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{file} has the name {name!r} {count} times: give each class its own")
    return content, classes


def _images(file: str, content: Mapping[str, Any], split: str) -> tuple[str, list[str]]:
    """Return the absolute paths or URIs of the images of a split, after the folder where the first of them are."""
    own, given = posixpath.dirname(file), content.get("path")
    named: list[Any] = value if isinstance(value := content.get(split), list) else [value]
    if not named or not all(name and isinstance(name, str) for name in named):
        raise UsageError(f"{file} names no folder of images for {split}: write `{split}: images/{split}`")
    # Where `path` is of another machine, or in Ultralytics' own folder, the images are beside the file.
    bases = [*([_joined(own, given)] if isinstance(given, str) else []), own]
    root, paths = "", list[str]()
    for name in named:
        # Roboflow's ../train/images is beside its file, too.
        forms = [(base, _joined(base, form)) for base in bases for form in (name.removeprefix("../"), name)]
        base, place = next((form for form in forms if _is_there(form[1])), ("", ""))
        if not place:
            raise UsageError(f"{file}: {split}: {name} is not in {summarize(bases)}: correct it, or path")
        root = root or base
        paths += sorted(_listed(place))
    if not paths:
        raise UsageError(f"{file}: {split}: no images in {place}: give files as {', '.join(IMAGE_EXTENSIONS)}")
    return root, paths


def _is_there(place: str) -> bool:
    return storage.is_folder(place) or (place.endswith(".txt") and storage.version_of(place) != storage.UNKNOWN)


def _listed(place: str) -> Iterator[str]:
    """Yield the paths of the images in a folder, at any depth, or of those that a text file lists."""
    if place.endswith(".txt"):
        lines = os.fsdecode(storage.read(place)).splitlines()
        yield from (_joined(posixpath.dirname(place), line.strip()) for line in lines if line.strip())
        return
    selected, skipped = select_files(list_tree(place, of="images"), IMAGE_EXTENSIONS)
    skipped.warn(place, IMAGE_EXTENSIONS)
    for folder, names in selected.items():
        yield from (f"{place}/{folder}/{name}" if folder else f"{place}/{name}" for name in names)


def _joined(folder: str, path: str) -> str:
    """Return a path as it is seen from a folder, without `.` and `..`."""
    if path.startswith(("/", "~")) or "://" in path:
        return absolute(path)
    scheme, mark, whole = f"{folder}/{path}".rpartition("://")
    if not mark and ".." in path.split("/"):  # the parent of a link's target is another one than the link's
        return os.path.realpath(whole)
    return f"{scheme}{mark}{posixpath.normpath(whole)}"


def _label_file(path: str) -> str:
    folder, mark, rest = path.rpartition("/images/")
    return f"{posixpath.splitext(f'{folder}/labels/{rest}' if mark else path)[0]}.txt"


def _boxes(
    file: str, classes: Mapping[int, str], labels: Files, ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Read the boxes of these images: the ids (B,) of their images, and the fields of their lines (B, 5)."""
    places, texts = list[tuple[int, int]](), list[bytes]()
    for id, content in zip(ids.tolist(), labels.contents(ids), strict=True):
        if isinstance(content, Failed):
            if isinstance(content.error, FileNotFoundError):
                continue
            raise UsageError(f"{labels.path(id)} cannot be read: {storage.reason(content.error)}: remove its cause")
        for number, line in enumerate(content.tobytes().splitlines(), 1):
            if len(fields := line.split()) not in (0, 5):
                what = f"{plural(len(fields), 'field')}, not 5: write {_FIELDS}, no confidence or polygon"
                raise UsageError(f"{labels.path(id)}, line {number} has {what}")
            if fields:
                texts += fields
                places.append((id, number))
    values = np.array([*map(_number, texts)]).reshape(-1, 5)
    inside = (values >= 0) & (values <= 1 + _ROUNDED)
    inside[:, 0] = np.isin(values[:, 0], [*classes])
    if not inside.all():
        wrong = int(inside.argmin())
        text, (id, number) = texts[wrong].decode(errors="replace"), places[wrong // 5]
        if wrong % 5:
            why = f"{text} is not from 0 to 1: write {_FIELDS} as shares of the image"
        else:
            why = f"class {text} has no name in {file}: add one, or remove the line"
        raise UsageError(f"{labels.path(id)}, line {number}: {why}")
    return np.array([id for id, _ in places], np.int64), values


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _shape(path: str) -> Shape | FileNotFoundError | None:
    """Return height and width of an image, the error if there is none, or None if it is broken."""
    try:
        shape = plain_shape(memoryview(_header(path)))
        return upright_shape(storage.read(path)) if shape is None else shape
    except FileNotFoundError as error:
        return error
    except storage.StoreError as error:
        raise UsageError(f"{error}: try again later, or give a copy of the data") from error
    except Exception:
        return None


def _header(path: str) -> bytes | memoryview:
    if "://" in path:
        return storage.fetch(storage.ObjectPart(path, 0, _HEADER))[0]
    with Path(path).open("rb") as file:
        return file.read(_HEADER)
