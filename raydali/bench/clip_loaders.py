"""The loaders of clips that are compared: raydali's, and other ways to read videos, each used in the usual way.

    raydali      VideoClips in the stream's order, with several decoders on a GPU
    reader       one pipeline around DALI's own `fn.readers.video`, shuffled in its buffer: GPUs only
    pyav         torch's DataLoader: PyAV seeks, decodes and scales in worker processes

Each is an endless generator of batches of clips. All do the same work: they resize the shorter side of the frames to
`image_size`, take a random square, mirror it or not, and deliver RGB in 8 bits or as normalized floats on the device.
If a loader allows it, only the pixels of the square are resized, by an antialiasing triangle filter. Memory layouts
differ.

Each loader runs in its own process, so slow imports are inside the functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

from raydali.bench.image_loaders import (
    EPOCHS,
    Batches,
    Contender,
    Task,
    data_loader_batches,
    endless,
    normalised,
)
from raydali.data.sources.video.clips import VideoClips
from raydali.data.tasks.video import TrainClips

SHUFFLED_AT_ONCE = 16
"""Number of clips in the buffer in which the native reader shuffles; all are decoded."""


@dataclass(frozen=True, kw_only=True)
class VideoTask(Task):
    """The measurement of one process.

    Attributes:
        batch_size: clips per batch.
        sequence_length: frames per clip.
        stride: distance from one frame of a clip to the next.
        decoders: number of raydali's decoders on a GPU; None for the default.
    """

    sequence_length: int
    stride: int
    decoders: int | None = None

    @property
    def contender(self) -> Contender:
        """The loader that is measured."""
        return VIDEO_LOADERS[self.loader]

    def clips(self) -> VideoClips:
        """Find the clips of the videos below the root."""
        return VideoClips.scan(self.root, sequence_length=self.sequence_length, stride=self.stride)

    def drawn(self) -> TrainClips:
        """Return the pipeline whose crops and flips all loaders use."""
        return TrainClips(seed=0, image_size=self.image_size, resize_size=self.image_size)


class Square(NamedTuple):
    """A crop of a clip's frames: a square in pixels of the video, mirrored or not."""

    top: int
    left: int
    side: int
    mirrored: bool


def _raydali(task: Any) -> Batches:
    import torch

    from raydali.data.loading.make import make_video_loader

    if task.gpu:
        torch.cuda.set_device(task.device)
    clips = task.clips()
    order = endless(len(clips), task.batch_size, task.world_size)
    where = {"rank": task.rank, "world_size": task.world_size, "device": task.device, "threads": task.threads}
    with make_video_loader("dali", clips, task.drawn(), order, decoders=task.decoders, **where) as loader:
        yield from normalised(task, loader, "clips")


def _reader(task: Any) -> Batches:
    from nvidia.dali import Pipeline as DaliPipeline
    from nvidia.dali import fn

    videos = task.clips().videos
    pipeline = DaliPipeline(
        batch_size=task.batch_size,
        num_threads=task.threads,
        device_id=task.rank,
        prefetch_queue_depth=2,
        seed=1 + task.rank,
    )
    with pipeline:
        read: Any = fn.readers.video(
            device="gpu",
            filenames=[videos.path(id) for id in range(len(videos))],
            labels=videos.labels.tolist(),
            sequence_length=task.sequence_length,
            stride=task.stride,
            random_shuffle=True,
            initial_fill=SHUFFLED_AT_ONCE,
            shard_id=task.rank,
            num_shards=task.world_size,
        )
        clips, labels = read
        pipeline.set_outputs(squares(task, clips), labels)
    pipeline.build()
    while True:
        yield pipeline.run()


def squares(task: Any, clips: Any) -> Any:
    """Add to a DALI graph a random square crop of clips (frames, height, width, 3)."""
    from nvidia.dali import fn, types

    from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

    shape = clips.shape(dtype=types.FLOAT)[1:3]
    side = fn.reductions.min(shape)
    start = fn.random.uniform(range=[0.0, 1.0], shape=[2]) * (shape - side)
    clips = fn.resize(clips, size=[task.image_size] * 2, roi_start=start, roi_end=start + side)
    mirror = fn.random.coin_flip()
    if not task.normalised:
        return fn.flip(clips, horizontal=mirror)
    mean, std = ([255 * value for value in values] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return fn.crop_mirror_normalize(clips, mean=mean, std=std, dtype=types.FLOAT, output_layout="FHWC", mirror=mirror)


def _pyav(task: Any) -> Batches:
    return _data_loader(task, read_by_pyav, channels=-1)


def _data_loader(task: Any, read: Callable[[Any, VideoClips, int], Any], channels: int) -> Batches:
    """Generate batches by a DataLoader, of clips that `read` returns in 8 bits; `channels` is the axis of channels."""
    import torch
    from torch.utils.data import Dataset

    from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

    torch.set_num_threads(1)  # inherited by the workers, which would otherwise start a thread per core each
    clips = task.clips()
    mean, std = (255 * torch.tensor(values) for values in (IMAGENET_MEAN, IMAGENET_STD))

    class Clips(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return len(clips)

        def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
            video = int(clips.places(torch.tensor([id]).numpy())[0][0])
            frames = read(task, clips, id).movedim(channels, -1)
            if task.normalised:
                frames = frames.float().sub_(mean).div_(std)
            return frames.movedim(-1, channels), int(clips.videos.labels[video])

    return data_loader_batches(task, Clips())


def _frames_of(task: Any, clips: VideoClips, id: int) -> tuple[str, list[int]]:
    import numpy as np

    (video,), (first,) = (part.tolist() for part in clips.places(np.array([id])))
    wanted = np.minimum(first + task.stride * np.arange(task.sequence_length), clips.frames[video] - 1)
    return clips.videos.path(video), wanted.tolist()


def square_of(task: Any, clips: VideoClips, id: int) -> Square:
    """Draw a square as `TrainClips` does, from torch's random numbers, at even positions as colors are coded."""
    import numpy as np
    import torch

    ids = np.array([id])
    drawn = task.drawn().crops(clips, ids, torch.randint(EPOCHS, (1,)).numpy())
    (shape,) = clips.upright_shapes[clips.places(ids)[0]]
    side = int(shape.min())
    top, left = (np.minimum(drawn.starts[0] * shape // drawn.resized[0], shape - side) // 2 * 2).tolist()
    return Square(top, left, side, bool(drawn.flips[0]))


def read_by_pyav(task: Any, clips: VideoClips, id: int) -> Any:
    """Read a clip (frames, image_size, image_size, 3), uint8, of a video with a constant frame rate.

    FFmpeg's filters crop before they resize and convert.
    """
    import av
    import numpy as np
    import torch

    path, wanted = _frames_of(task, clips, id)
    square, side = square_of(task, clips, id), str(task.image_size)
    opened: Any = av.open(path)
    with opened as container:
        stream = container.streams.video[0]
        graph: Any = av.filter.Graph()
        graph.link_nodes(
            graph.add_buffer(template=stream),
            *map(graph.add, compress(("transpose", "vflip", "hflip"), clips.orientation(id))),
            graph.add("crop", f"{square.side}:{square.side}:{square.left}:{square.top}"),
            graph.add("scale", f"{side}:{side}:flags=bilinear"),
            graph.add("format", "rgb24"),
            graph.add("hflip" if square.mirrored else "null"),
            graph.add("buffersink"),
        ).configure()
        step = 1 / (stream.average_rate * stream.time_base)
        begin = stream.start_time or 0
        container.seek(int(begin + wanted[0] * step), stream=stream)
        found = {}
        for frame in container.decode(stream):
            place = round((frame.pts - begin) / step)
            if place in wanted:
                graph.push(frame)
                found[place] = graph.pull().to_ndarray()
            if place >= wanted[-1]:
                break
    return torch.from_numpy(np.stack([found[place] for place in wanted]))


VIDEO_LOADERS = {
    "raydali": Contender(batches=_raydali, all_queues=True),
    "reader": Contender(batches=_reader),
    "pyav": Contender(batches=_pyav, parallel=True),
}
