"""What many videos hold, `VideoInfo` of each as flat arrays, and the cache of it: a video is opened once.

A video's entry in the cache counts while its size and the time of its last change are those of then. Every root has a
file of its own there, lists of absolute paths share one. An entry that no run has asked for in 90 days goes.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources import storage
from raydali.data.sources.cache import keep_arrays, kept_arrays
from raydali.data.sources.files import Files, digest
from raydali.data.sources.patterns import folder_entries
from raydali.data.sources.video.packets import VideoInfo, read_facts
from raydali.extras import require_extra

_VERSION = b"1"  # another one for another content of the cached file
_THREADS = 32
_KEPT_DAYS = 90
_FRESH_DAYS = 7
"""How old the note of an entry's last use may get before it is renewed, which writes the file."""
_UNKNOWN = -1, -1
_PART = 256
"""Files that a thread looks at, one after the other."""
A = TypeVar("A")
B = TypeVar("B")

_log = logging.getLogger(__name__)

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class VideoTable:
    """`VideoInfo` of V videos.

    Attributes:
        frames: int64 (V,).
        shapes: int64 (V, 2), height and width in pixels.
        codecs: FFmpeg's names, of V.
        has_header: bool (V,).
        key_frames, key_times: int64, all videos' one after the other.
        key_offsets: int64 (V + 1,), where each video's begin in them, and where one more would.
    """

    frames: Integers
    shapes: Integers
    codecs: NDArray[np.str_]
    has_header: NDArray[np.bool_]
    key_frames: Integers
    keyframe_pts: Integers
    key_offsets: Integers

    @classmethod
    def of(cls, facts: Sequence[VideoInfo]) -> Self:
        """The table of these, in their order."""
        none = np.zeros(0, np.int64)
        return cls(
            frames=np.array([fact.frames for fact in facts], np.int64),
            shapes=np.array([(fact.height, fact.width) for fact in facts], np.int64).reshape(-1, 2),
            codecs=np.array([fact.codec for fact in facts], np.str_),
            has_header=np.array([fact.has_header for fact in facts], np.bool_),
            key_frames=np.concatenate([none, *(fact.key_frames for fact in facts)]),
            keyframe_pts=np.concatenate([none, *(fact.keyframe_pts for fact in facts)]),
            key_offsets=np.array([0, *accumulate(len(fact.key_frames) for fact in facts)]),
        )

    def __len__(self) -> int:
        """V."""
        return len(self.frames)

    def __add__(self, other: Self) -> Self:
        """The videos of both."""
        joined = {
            field.name: np.concatenate([getattr(self, field.name), getattr(other, field.name)])
            for field in fields(self)
            if field.name != "key_offsets"
        }
        offsets = np.concatenate([self.key_offsets, self.key_offsets[-1] + other.key_offsets[1:]])
        return type(self)(**joined, key_offsets=offsets)

    def take(self, rows: Integers) -> Self:
        """These videos, in this order."""
        begins, lengths = self.key_offsets[rows], np.diff(self.key_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        keys = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
        return type(self)(
            frames=self.frames[rows],
            shapes=self.shapes[rows],
            codecs=self.codecs[rows],
            has_header=self.has_header[rows],
            key_frames=self.key_frames[keys],
            keyframe_pts=self.keyframe_pts[keys],
            key_offsets=offsets,
        )


def video_table(videos: Files) -> tuple[VideoTable, dict[int, str]]:
    """What these videos hold, from the cache where it knows them as they are; the others are opened, on many threads.

    Returns:
        The table of those that are sound, in their order; and by id why the others are broken.

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
    facts: list[VideoInfo] = []
    opened = np.flatnonzero(rows < 0).tolist()
    for id, found in zip(opened, _on_threads(lambda id: _facts_or_reason(videos, id), opened), strict=True):
        if isinstance(found, str):
            broken[id] = found
        else:
            rows[id] = len(cached.names) + len(facts)
            facts.append(found)
    sound = np.delete(np.arange(len(videos)), [*broken])
    table = cached.table + VideoTable.of(facts)
    cached.renewed([names[id] for id in sound.tolist()], stamps[sound], rows[sound], table).keep(place)
    return table.take(rows[sound]), broken


def _facts_or_reason(videos: Files, id: int) -> VideoInfo | str:
    try:
        return read_facts(videos.path(id))
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class _Cached:
    """The cache's file of a root.

    Attributes:
        names: the videos' paths below the root, V.
        stamps: int64 (V, 2), size in bytes and time of the last change in ns.
        used: int64 (V,), the day of the last use.
        table: what they hold.
        is_new: whether it differs from what lies on the disk.
    """

    names: list[bytes]
    stamps: Integers
    used: Integers
    table: VideoTable
    is_new: bool = False

    @classmethod
    def read(cls, place: str) -> Self:
        """That at a place; an empty one where there is none, or no whole one."""
        for held in kept_arrays(place):
            try:
                table = VideoTable(**{field.name: held[field.name] for field in fields(VideoTable)})
            except KeyError:  # an earlier version's
                continue
            names = held["names"].tobytes().split(b"\0") if len(table) else []
            return cls(names, held["stamps"], held["used"], table)
        return cls([], np.zeros((0, 2), np.int64), np.zeros(0, np.int64), VideoTable.of([]))

    def rows(self, names: list[bytes], stamps: Integers) -> Integers:
        """The entry of each of these videos, as they are now; -1 where there is none."""
        places = dict(zip(self.names, range(len(self.names)), strict=True))
        rows = np.fromiter((places.get(name, -1) for name in names), np.int64, len(names))
        known = np.flatnonzero(rows >= 0)
        changed = (self.stamps[rows[known]] != stamps[known]).any(1) | (stamps[known] == _UNKNOWN).any(1)
        rows[known[changed]] = -1
        return rows

    def renewed(self, names: list[bytes], stamps: Integers, rows: Integers, table: VideoTable) -> Self:
        """What is to be kept now: these videos, which are `rows` of the table, and the others that were used lately."""
        today, there = int(time.time() // 86400), {*names}
        known = rows[rows < len(self.names)]
        is_new = bool(len(known) < len(rows) or (self.used[known] < today - _FRESH_DAYS).any())
        others = [
            row
            for row, (name, used) in enumerate(zip(self.names, self.used.tolist(), strict=True))
            if name not in there and used >= today - _KEPT_DAYS
        ]
        return type(self)(
            names=[*(self.names[row] for row in others), *names],
            stamps=np.concatenate([self.stamps[others], stamps]),
            used=np.concatenate([self.used[others], np.full(len(names), today)]),
            table=table.take(np.concatenate([np.array(others, np.int64), rows])) if is_new else table,
            is_new=is_new,
        )

    def keep(self, place: str) -> None:
        """Write it, where it is new."""
        if self.is_new:
            arrays = {field.name: getattr(self.table, field.name) for field in fields(VideoTable)}
            names = np.frombuffer(b"\0".join(self.names), np.uint8)
            keep_arrays(place, names=names, stamps=self.stamps, used=self.used, **arrays)


def _stamps(videos: Files, names: Sequence[bytes]) -> Integers:
    """Size and time of the last change of each video, (V, 2); -1 where they cannot be had.

    Of objects a folder's come from one listing.
    """
    paths = [os.path.join(videos.root, os.fsdecode(name)) for name in names]
    stamps = np.full((len(paths), 2), -1, np.int64)
    local = [id for id, path in enumerate(paths) if path.startswith("/")]
    parts = [local[start : start + _PART] for start in range(0, len(local), _PART)]
    for part, found in zip(parts, _on_threads(lambda ids: [_stamp(paths[id]) for id in ids], parts), strict=True):
        stamps[part] = found
    folders: dict[str, list[int]] = {}
    for id, path in enumerate(paths):
        if not path.startswith("/"):
            storage.file_system(path)  # opened once, before all threads ask for it
            folders.setdefault(path.rpartition("/")[0], []).append(id)
    for ids, there in zip(folders.values(), _on_threads(_stamps_in, [*folders]), strict=True):
        stamps[ids] = [there.get(paths[id].rpartition("/")[2], _UNKNOWN) for id in ids]
    return stamps


def _stamp(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:  # which opening it will tell
        return _UNKNOWN
    return stat.st_size, stat.st_mtime_ns


def _stamps_in(folder: str) -> dict[str, tuple[int, int]]:
    try:
        return {entry.name: (entry.size, entry.written) for entry in folder_entries(folder) if entry}
    except OSError:  # who may read objects may perhaps not list them: then each is opened
        return {}


def _on_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, items))
