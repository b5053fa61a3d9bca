"""Clips of videos: a video is cut into clips of equal length, and each of them is a sample with an id.

    video 0, 60 frames    |clip 0   |clip 1   |clip 2   |..         the remainder is not used
    video 1, 31 frames    |clip 3   |clip 4   |
    video 2,  7 frames    |clip 5...|                               too short: its last frame is repeated

Frames are counted, not timed: a clip has the same number of frames at a variable frame rate. A video is indexed once,
and the result is cached for later runs (table.py). Indexing reads the container's table of frames if it has one (MP4,
MOV, AVI), else every packet to the end of the file (WebM, Matroska, MPEG-TS, an AVI without its index).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.files import digest
from raydali.data.index.labeled import LabeledFiles
from raydali.data.video.packets import ClipPackets, Orientation, read_clip_packets
from raydali.data.video.table import VideoTable, video_table
from raydali.errors import UsageError
from raydali.text import plural, summarize

EXTENSIONS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".ivf", ".ts", ".mts")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class VideoClips:
    """N clips of V videos, by id 0..N-1: video by video, in order of time. Made by `scan` or `index`.

    Attributes:
        videos: the files and their classes.
        sequence_length: number of frames of a clip.
        stride: distance between the frames of a clip.
        step: distance between the first frames of consecutive clips.
        table: the `VideoInfo` of each video.
    """

    videos: LabeledFiles
    sequence_length: int
    stride: int
    step: int
    table: VideoTable

    @classmethod
    def scan(
        cls, root: str, *, sequence_length: int, stride: int = 1, step: int | None = None, skip_broken: bool = False
    ) -> Self:
        """Index the clips of the videos in the class folders of a root; see `scan_videos` and `index`."""
        check_clips(sequence_length, stride, step)
        videos = scan_videos(root)
        return cls.index(videos, sequence_length=sequence_length, stride=stride, step=step, skip_broken=skip_broken)

    @classmethod
    def index(
        cls,
        videos: LabeledFiles,
        *,
        sequence_length: int,
        stride: int = 1,
        step: int | None = None,
        skip_broken: bool = False,
    ) -> Self:
        """Index the clips of these videos; opens those that are not in the cache of `video_table`.

        A video too short for a clip is one clip, with its last frame repeated; a warning counts these.

        Args:
            videos: from folders or from a list.
            sequence_length: number of frames of a clip.
            stride: distance between the frames of a clip.
            step: distance between the first frames of consecutive clips. Default: the frames that a clip spans, so that
                clips do not overlap.
            skip_broken: leave out videos that cannot be read, with a warning, instead of refusing them.

        Raises:
            UsageError: a number below 1; videos that are cut off, empty or in no known format.
        """
        span = check_clips(sequence_length, stride, step)
        table, broken = video_table(videos)
        if broken:
            named = summarize(broken.values(), limit=5, separator="; ")
            if not skip_broken or not len(table):
                raise UsageError(
                    f"{len(broken)} of {plural(len(videos), 'video')} cannot be read ({named}): move them away, or "
                    f"leave them out with --skip-broken"
                )
            _log.warning("left out %d of %s that cannot be read: %s", len(broken), plural(len(videos), "video"), named)
            videos = videos.drop(broken)
        if short := int((table.frames < span).sum()):
            _log.warning(
                "%s: %d of %s have fewer than the %d frames of a clip: their last frame is repeated",
                videos,
                short,
                plural(len(videos), "video"),
                span,
            )
        return cls(videos, sequence_length, stride, span if step is None else step, table)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """The id of each video's first clip, and N, (V + 1,)."""
        span = (self.sequence_length - 1) * self.stride + 1
        return np.concatenate([[0], np.cumsum(np.maximum(0, (self.table.frames - span) // self.step) + 1)])

    def __len__(self) -> int:
        """N."""
        return int(self._offsets[-1])

    def __str__(self) -> str:
        """For messages."""
        return str(self.videos)

    def relocate(self, root: str) -> Self:
        """The same index for a copy of the videos at another root, which is not checked."""
        return replace(self, videos=self.videos.relocate(root))

    def places(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The video of each clip and the clip's first frame in it, (n,) each."""
        videos = np.searchsorted(self._offsets, ids, "right") - 1
        return videos, (ids - self._offsets[videos]) * self.step

    def labels(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The classes of these clips, int64."""
        return self.videos.labels[self.places(ids)[0]]

    def read(self, id: int) -> bytes:
        """The content of a clip's video."""
        return self.videos.read(int(self.places(np.array([id]))[0][0]))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.videos.classes

    @property
    def one_each(self) -> NDArray[np.int64]:
        """The class of every clip, int64 (N,)."""
        return self.labels(np.arange(len(self)))

    @cached_property
    def upright_shapes(self) -> NDArray[np.int64]:
        """Height and width of each video as it is displayed, int64 (V, 2)."""
        return np.where(self.table.orientations[:, :1], self.table.shapes[:, ::-1], self.table.shapes)

    def orientation(self, id: int) -> Orientation:
        """How the coded frames of a clip are turned to be upright."""
        return Orientation(*self.table.orientations[self.places(np.array([id]))[0][0]].tolist())

    @cached_property
    def largest(self) -> dict[str, tuple[int, int]]:
        """The largest coded height and the largest coded width of all videos of a codec, in pixels."""
        codecs, shapes = self.table.codecs, self.table.shapes
        by_codec = {str(codec): shapes[codecs == codec].max(0) for codec in np.unique(codecs)}
        return {codec: (int(height), int(width)) for codec, (height, width) in by_codec.items()}

    @contextmanager
    def cut(self, id: int) -> Iterator[ClipPackets]:
        """Read the packets that a clip needs, and the times of its frames.

        Raises:
            OSError: the video cannot be read or decoded, or has changed since; names its path and the clip.
        """
        (video,), (first,) = (part.tolist() for part in self.places(np.array([id])))
        path = self.videos.path(video)
        try:
            with read_clip_packets(path, self.table.info(video), first, self.stride, self.sequence_length) as packets:
                yield packets
        except OSError as error:
            reason = str(error).removeprefix(f"cannot read {path}: ")
            raise OSError(f"{self.path(id)} cannot be read: {reason}") from error

    def path(self, id: int) -> str:
        """Return, for messages, the video's absolute path or URI and the clip's first frame in it."""
        (video,), (first,) = (part.tolist() for part in self.places(np.array([id])))
        return f"{self.videos.path(video)} (from frame {first})"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the videos' fingerprint, their lengths and how they are cut, 32 hex digits; without the root."""
        numbers = np.array([self.sequence_length, self.stride, self.step, *self.table.frames.tolist()], "<i8")
        return digest(self.videos.fingerprint.encode(), numbers.data)


def scan_videos(root: str) -> LabeledFiles:
    """Index the videos in the class folders of a root with `LabeledFiles.scan`; none is opened."""
    return LabeledFiles.scan(root, EXTENSIONS, "videos")


def check_clips(sequence_length: int, stride: int, step: int | None) -> int:
    """The number of frames that a clip spans.

    Raises:
        UsageError: a number below 1.
    """
    for name, value in (("sequence-length", sequence_length), ("stride", stride), ("step", step)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    return (sequence_length - 1) * stride + 1
