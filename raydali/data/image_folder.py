"""Class folders of images, indexed once: on local disks, in `s3://` and in `gs://`.

The index is that of `torchvision.datasets.ImageFolder`: the same classes, files and order, so that labels and ids
mean the same in both. Kept as three flat arrays it pickles without copying (protocol 5), and the workers of a node
share one copy in Ray's object store. Where torchvision is silent this is not: an unreadable folder is an error, an
empty class a warning, and a link to a folder above itself, which would be walked some forty times, is left out.
"""

import logging
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data import object_store
from raydali.errors import UsageError

# torchvision.datasets.folder.IMG_EXTENSIONS
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# File names by folder, both relative to the root; the first part of a folder is its class.
Listing = dict[str, list[str]]

# In s3:// URIs DALI takes ? and # for a query and a fragment, and folds // and dots as in a file path; \0 joins paths.
_UNREADABLE_KEY = re.compile(r"[?#\0]|//|/\.\.?/")
_READING_THREADS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """N images in class folders, by id 0..N-1: sorted by class, then folder, then name. Made by `scan`.

    Attributes:
        root: an absolute path or a URI, with no slash at its end.
        classes: names of the class folders, sorted; a label is an index into it.
        labels: int64 (N,).
        packed_paths: uint8, the paths relative to the root, joined by NUL.
        offsets: int64 (N + 1,), where each path begins in packed_paths, and where one more would.
    """

    root: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    packed_paths: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def scan(cls, root: str) -> "ImageFolder":
        """The index of the folder at a local path (`~` is expanded), or at an `s3://` or `gs://` URI.

        Object stores are reached as `object_store.file_system` says.

        Raises:
            UsageError: no such folder or bucket, or no right to read it; no class folders; no images; an object
                whose name DALI cannot read.
        """
        root = _absolute(root)
        listing = _list_objects(root) if "://" in root else _list_files(root)
        if not listing:
            raise UsageError(f"{root} holds no class folders: give a folder that holds one folder of images a class")

        classes = sorted({folder.partition("/")[0] for folder in listing})
        counts = dict.fromkeys(classes, 0)
        packed = []
        for class_, folder in sorted((folder.partition("/")[0], folder) for folder in listing):
            if names := sorted(name for name in listing[folder] if name.lower().endswith(EXTENSIONS)):
                counts[class_] += len(names)
                packed.append(os.fsencode(f"{folder}/" + f"\0{folder}/".join(names)))
        if not packed:
            raise UsageError(f"no images in the {len(classes)} class folders of {root}: need {', '.join(EXTENSIONS)}")
        if empty := [class_ for class_ in classes if not counts[class_]]:
            _log.warning("%s: no images in %d of %d classes: %s", root, len(empty), len(classes), _some(empty))

        paths = np.frombuffer(b"\0".join(packed), np.uint8)
        offsets = np.concatenate([[0], np.flatnonzero(paths == 0) + 1, [len(paths) + 1]])
        labels = np.repeat(np.arange(len(classes)), list(counts.values()))
        return cls(root, tuple(classes), labels, paths, offsets)

    def __len__(self) -> int:
        """N."""
        return len(self.labels)

    def at(self, root: str) -> "ImageFolder":
        """The same index for a copy of the data at another root, which is not looked at."""
        return replace(self, root=_absolute(root))

    def path(self, id: int) -> str:
        """The absolute path or the URI of an image."""
        return os.fsdecode(self.encoded_paths(np.array([id]))[0].tobytes())

    def encoded_paths(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The bytes of these images' absolute paths or URIs, as DALI's `fn.io.file.read` takes them."""
        root, paths = os.fsencode(os.path.join(self.root, "")), self.packed_paths.data
        begins, ends = self.offsets[ids].tolist(), (self.offsets[ids + 1] - 1).tolist()
        return [np.frombuffer(root + paths[b:e], np.uint8) for b, e in zip(begins, ends, strict=True)]

    @property
    def dali_reads(self) -> bool:
        """Whether DALI can read these images by their paths: all but `gs://`."""
        # DALI 2.4.0 asks Google's storage for a name with a NUL at its end.
        return not self.root.startswith("gs://")

    def files(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """These images for a DALI graph, uint8 each: paths where `dali_reads`, for `fn.io.file.read`, else contents.

        Raises:
            OSError: a file cannot be read; names its path. Paths are not looked at.
        """
        if self.dali_reads:
            return self.encoded_paths(ids)
        object_store.file_system(self.root)  # opened once, before all threads ask for it
        with ThreadPoolExecutor(_READING_THREADS) as threads:
            # In parts, since handing single files from thread to thread takes as long as reading them.
            parts = threads.map(self._contents, np.array_split(ids, _READING_THREADS))
            return list(chain.from_iterable(parts))

    def _contents(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(self.read(id), np.uint8) for id in ids.tolist()]

    def read(self, id: int) -> bytes:
        """The content of an image's file.

        Raises:
            OSError: it cannot be read; names its path.
        """
        path = self.path(id)
        return object_store.read(path) if "://" in self.root else Path(path).read_bytes()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of relative paths, labels and classes; not of the root, so the data may move."""
        digest = blake2b(digest_size=16)
        for part in (os.fsencode("\0".join(self.classes)), self.packed_paths.data, self.labels.astype("<i8").data):
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def check_classes(train: ImageFolder, val: ImageFolder) -> None:
    """Refuses a validation set with other classes than the training set's: its labels would mean something else.

    Raises:
        UsageError: names some of the classes that are missing or too many.
    """
    missing, extra = (sorted({*a.classes} - {*b.classes}) for a, b in ((train, val), (val, train)))
    parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has besides", extra)) if names]
    if parts:
        raise UsageError(
            f"{val.root} {' and '.join(parts)}, against the {len(train.classes)} classes of {train.root}: "
            f"both need the same class folders"
        )


def _absolute(root: str) -> str:
    if "://" not in root:
        # Not os.path.abspath: it folds `link/..` by text, to another folder than the kernel's.
        return str(Path(os.path.expanduser(root)).absolute())
    if not re.match(r"(s3|gs)://[\w.-]+(/|$)", root):
        raise UsageError(f"cannot read {root}: give a local path, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
    return root.rstrip("/")


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _list_files(root: str) -> Listing:
    if not os.path.isdir(root):
        raise UsageError(f"{root} is {'a file' if os.path.exists(root) else 'missing'}: give a folder of class folders")
    listing: Listing = {}
    # A folder's last item: its real path, then those of the folders whose links led there.
    pending: list[tuple[str, str, tuple[str, ...]]] = [("", root, (os.path.realpath(root),))]
    while pending:
        folder, path, reals = pending.pop()
        names = listing[folder] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    try:
                        is_folder = entry.is_dir()
                    except OSError:  # a link that cannot be followed counts as a file, as in os.walk
                        is_folder = False
                    if not is_folder:
                        names.append(entry.name)
                        continue
                    below: tuple[str, ...] = (f"{reals[0]}/{entry.name}", *reals[1:])
                    if entry.is_symlink():
                        below = (os.path.realpath(entry.path), *reals)
                        if any(os.path.commonpath([real, below[0]]) == below[0] for real in reals):
                            _log.warning("left out %r: it links to %r, which holds it", entry.path, below[0])
                            continue
                    pending.append((f"{folder}/{entry.name}".lstrip("/"), entry.path, below))
        except OSError as error:
            raise UsageError(f"cannot list {path!r}: {error.strerror}; make it readable or move it away") from error
    del listing[""]
    return listing


def _list_objects(root: str) -> Listing:
    from pyarrow.fs import FileSelector, FileType

    base = root.partition("://")[2]
    try:
        found: Iterable[Any] = object_store.file_system(root).get_file_info(FileSelector(base, recursive=True))
    except OSError as error:
        reason = object_store.reason(error)
        raise UsageError(f"cannot list {root}: check the name, credentials and endpoint: {reason}") from error

    listing: Listing = {}
    for info in found:
        key = info.path[len(base) + 1 :]
        folder, _, name = key.rpartition("/")
        if info.type == FileType.Directory:
            listing.setdefault(key, [])
        elif folder:
            listing.setdefault(folder, []).append(name)
            if _UNREADABLE_KEY.search(info.path) and name.lower().endswith(EXTENSIONS):
                raise UsageError(f"DALI cannot read {info.path!r}: rename it without ?, #, //, /./ and /../")
    return listing
