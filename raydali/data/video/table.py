"""The `VideoInfo` of many videos as flat arrays, and its cache, so that each video is opened only once.

An entry of the cache is valid while the video's size and time of last change stay the same. Every root has a file in
the cache, and lists of absolute paths share one.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.cache import cache_arrays, cached_arrays
from raydali.data.index.files import Files, digest
from raydali.data.index.listing import folder_entries
from raydali.data.read import storage
from raydali.data.video.packets import Orientation, VideoInfo, read_video_info
from raydali.extras import require_extra

_VERSION = b"2"  # another one for another content of the cached file
_THREADS = 32
_UNKNOWN = -1, -1
A = TypeVar("A")
B = TypeVar("B")

_log = logging.getLogger(__name__)

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class VideoTable:
    """`VideoInfo` of V videos.

    Attributes:
        frames: int64 (V,).
        shapes: int64 (V, 2), coded height and width in pixels.
        orientations: bool (V, 3), see `Orientation`.
        codecs: FFmpeg's names, (V,).
        has_header: bool (V,).
        key_frames, keyframe_pts: int64, the values of all videos concatenated.
        key_offsets: int64 (V + 1,), where each video's begin in them, and their end.
    """

    frames: Integers
    shapes: Integers
    orientations: NDArray[np.bool_]
    codecs: NDArray[np.str_]
    has_header: NDArray[np.bool_]
    key_frames: Integers
    keyframe_pts: Integers
    key_offsets: Integers

    @classmethod
    def from_infos(cls, infos: Sequence[VideoInfo]) -> Self:
        """Make a table of these, in their order."""
        none = np.zeros(0, np.int64)
        return cls(
            frames=np.array([info.frames for info in infos], np.int64),
            shapes=np.array([(info.height, info.width) for info in infos], np.int64).reshape(-1, 2),
            orientations=np.array([info.orientation for info in infos], np.bool_).reshape(-1, 3),
            codecs=np.array([info.codec for info in infos], np.str_),
            has_header=np.array([info.has_header for info in infos], np.bool_),
            key_frames=np.concatenate([none, *(info.key_frames for info in infos)]),
            keyframe_pts=np.concatenate([none, *(info.keyframe_pts for info in infos)]),
            key_offsets=np.array([0, *accumulate(len(info.key_frames) for info in infos)]),
        )

    def __len__(self) -> int:
        """V."""
        return len(self.frames)

    def info(self, video: int) -> VideoInfo:
        """Return what is known of one video."""
        keys = slice(*self.key_offsets[video : video + 2].tolist())
        height, width = self.shapes[video].tolist()
        return VideoInfo(
            frames=int(self.frames[video]),
            height=height,
            width=width,
            orientation=Orientation(*self.orientations[video].tolist()),
            codec=str(self.codecs[video]),
            has_header=bool(self.has_header[video]),
            key_frames=self.key_frames[keys],
            keyframe_pts=self.keyframe_pts[keys],
        )

    def __add__(self, other: Self) -> Self:
        """Concatenate two tables."""
        joined = {
            field.name: np.concatenate([getattr(self, field.name), getattr(other, field.name)])
            for field in fields(self)
            if field.name != "key_offsets"
        }
        offsets = np.concatenate([self.key_offsets, self.key_offsets[-1] + other.key_offsets[1:]])
        return type(self)(**joined, key_offsets=offsets)

    def take(self, rows: Integers) -> Self:
        """Select videos, in this order."""
        begins, lengths = self.key_offsets[rows], np.diff(self.key_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        keys = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
        return type(self)(
            frames=self.frames[rows],
            shapes=self.shapes[rows],
            orientations=self.orientations[rows],
            codecs=self.codecs[rows],
            has_header=self.has_header[rows],
            key_frames=self.key_frames[keys],
            keyframe_pts=self.keyframe_pts[keys],
            key_offsets=offsets,
        )


def video_table(videos: Files) -> tuple[VideoTable, dict[int, str]]:
    """Index videos, from the cache if its entries are valid; the others are opened on many threads.

    Returns:
        The table of the readable videos, in their order; and by id the errors of the broken ones.

    Raises:
        UsageError: PyAV is not installed.
    """
    require_extra("video", "av", "videos")
    place = f"videos/{digest(_VERSION, os.fsencode(videos.root))}.npz"
    names = videos.packed_paths.tobytes().split(b"\0")
    stamps = _stamps(videos, names)
    cached = _Cached.read(place)
    rows = cached.rows(names, stamps)
    broken: dict[int, str] = {}
    infos: list[VideoInfo] = []
    opened = np.flatnonzero(rows < 0).tolist()
    for id, info_or_reason in zip(opened, _on_threads(lambda id: _info_or_reason(videos, id), opened), strict=True):
        if isinstance(info_or_reason, str):
            broken[id] = info_or_reason
        else:
            rows[id] = len(cached.names) + len(infos)
            infos.append(info_or_reason)
    sound = np.delete(np.arange(len(videos)), [*broken])
    table = cached.table + VideoTable.from_infos(infos)
    if infos:
        cached.write(place, [names[id] for id in sound.tolist()], stamps[sound], rows[sound], table)
    return table.take(rows[sound]), broken


def _info_or_reason(videos: Files, id: int) -> VideoInfo | str:
    try:
        return read_video_info(videos.path(id))
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class _Cached:
    """The cache file of a root.

    Attributes:
        names: the videos' paths below the root, (V,).
        stamps: int64 (V, 2), size in bytes and time of the last change in ns.
        table: their `VideoInfo`.
    """

    names: list[bytes]
    stamps: Integers
    table: VideoTable

    @classmethod
    def read(cls, place: str) -> Self:
        """Read a cache file; empty if there is none, or an incomplete one."""
        for held in cached_arrays(place):
            table = VideoTable(**{field.name: held[field.name] for field in fields(VideoTable)})
            return cls(held["names"].tobytes().split(b"\0") if len(table) else [], held["stamps"], table)
        return cls([], np.zeros((0, 2), np.int64), VideoTable.from_infos([]))

    def rows(self, names: list[bytes], stamps: Integers) -> Integers:
        """The row of each of these videos; -1 if there is no valid entry."""
        places = dict(zip(self.names, range(len(self.names)), strict=True))
        rows = np.fromiter((places.get(name, -1) for name in names), np.int64, len(names))
        cached = np.flatnonzero(rows >= 0)
        changed = (self.stamps[rows[cached]] != stamps[cached]).any(1) | (stamps[cached] == _UNKNOWN).any(1)
        rows[cached[changed]] = -1
        return rows

    def write(self, place: str, names: list[bytes], stamps: Integers, rows: Integers, table: VideoTable) -> None:
        """Write the cache file with these videos, which are `rows` of the table, and the others of this one."""
        there = {*names}
        others = [row for row, name in enumerate(self.names) if name not in there]
        arrays = vars(table.take(np.concatenate([np.array(others, np.int64), rows])))
        packed = np.frombuffer(b"\0".join([*(self.names[row] for row in others), *names]), np.uint8)
        cache_arrays(place, names=packed, stamps=np.concatenate([self.stamps[others], stamps]), **arrays)


def _stamps(videos: Files, names: Sequence[bytes]) -> Integers:
    """Size and time of the last change of each video, (V, 2); -1 if they are unknown.

    Each folder is listed once: one request gives the sizes and times of all objects in it.
    """
    paths = [os.path.join(videos.root, os.fsdecode(name)) for name in names]
    folders: dict[str, list[int]] = {}
    for id, path in enumerate(paths):
        folders.setdefault(path.rpartition("/")[0] or "/", []).append(id)
    for folder in folders:
        if "://" in folder:
            storage.file_system(folder)  # opened once, before all threads need it
    stamps = np.full((len(paths), 2), -1, np.int64)
    for ids, there in zip(folders.values(), _on_threads(_stamps_in, folders), strict=True):
        stamps[ids] = [there.get(paths[id].rpartition("/")[2], _UNKNOWN) for id in ids]
    return stamps


def _stamps_in(folder: str) -> dict[str, tuple[int, int]]:
    try:
        return {entry.name: (entry.size, entry.written) for entry in folder_entries(folder)}
    except OSError:  # without the right to list it each video is opened
        return {}


def _on_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, items))
