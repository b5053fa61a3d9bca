"""`raydali bench video`: how many frames per second loaders of clips deliver when nothing uses them.

    raydali bench video --data ~/kinetics/train --gpus 1,2,4 --decoders 1,7 --json video.json
    raydali bench video --codec mjpeg --height 240 --make 16 --frames 60 --loaders raydali,pyav

    raydali      VideoClips in the stream's order, with several decoders on a GPU
    reader       one pipeline around DALI's own `fn.readers.video`, shuffled in its buffer: GPUs only
    pyav         torch's DataLoader: PyAV seeks, decodes and scales in worker processes

As in `raydali bench loader`, each is an endless generator of batches, and all do the same work: they resize the shorter
side of the frames to `image_size`, take a random square, mirror it or not, and deliver RGB in 8 bits or as normalized
floats on the device. If a loader allows it, only the pixels of the square are resized, by an antialiasing triangle
filter. Memory layouts differ.
"""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from raydali.bench import common, synthetic
from raydali.bench.loader_rates import (
    PIXELS,
    Batches,
    LoadingOptions,
    Task,
    loader_columns,
    loader_rows,
    loader_title,
    measure_loaders,
    row_name,
)
from raydali.bench.synthetic import VideoCodec
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.output import devices

if TYPE_CHECKING:
    from raydali.data.video.clips import VideoClips

CHOICE = ("raydali", "reader", "pyav")
RIVALS = ("reader", "pyav")
SHUFFLED_AT_ONCE = 16
"""Number of clips in the buffer in which the native reader shuffles; all are decoded."""


@dataclass(frozen=True, kw_only=True)
class VideoBench(LoadingOptions):
    """Measure how many frames per second loaders of clips deliver when nothing uses them, as a table with ratios."""

    data: str | None = None
    """Folder of class folders of videos. Default: synthetic videos."""
    make: int = 64
    """Without --data: number of synthetic videos, in a temporary folder."""
    codec: VideoCodec = "h264"
    """Codec of synthetic videos."""
    frames: int = 300
    """Frames of each synthetic video; every 30th is a keyframe."""
    height: int = 1080
    """Height of synthetic videos, in pixels; their width is 16/9 of it."""
    decoders: str | None = None
    """Numbers of clips that raydali decodes at once per GPU, such as 1,7,14. Default: three per two video engines."""
    batch_size: int = 8
    """Clips per batch and GPU."""
    sequence_length: int = 16
    """Frames per clip."""
    stride: int = 1
    """Distance from one frame of a clip to the next."""
    threads: int = 16
    """DALI threads per GPU."""
    loaders: str = ",".join(CHOICE)
    """Loaders to measure. The reader is left out if there is no GPU."""


def main(options: VideoBench) -> dict[str, Any]:
    """Measure the loaders, show the table and write the file.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "decoders" (null: the default), "frames_per_second", and what else
        `measure_loaders` adds}.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a loader could not be measured; after the other results were shown and written.
    """
    from raydali.data.video.clips import VideoClips

    require_extra("video", "av", "videos")
    common.check(options, loaders=CHOICE, pixels=PIXELS)
    counts = common.gpu_counts(options.gpus)
    rows = _rows(options, counts)
    videos = synthetic.VideoSet(options.codec, options.make, options.frames, options.height)
    with synthetic.folder_or(options.data, partial(synthetic.write_videos, wanted=videos)) as root:
        clips = VideoClips.scan(root, sequence_length=options.sequence_length, stride=options.stride)
        common.check_samples(options, len(clips), max(counts), devices(max(counts)), unit="clips")

        def task(row: dict[str, Any]) -> VideoTask:
            of_row = {name: row[name] for name in ("loader", "pixels", "decoders")}
            return common.task_of(VideoTask, options, root=root, **of_row)

        measure_loaders(rows, task, options, RIVALS, unit="frames", units_each=options.sequence_length)
    settings = asdict(options) | {"videos": len(clips.videos), "clips": len(clips)}
    samples = f"{len(clips):,} clips of {options.sequence_length} frames in {len(clips.videos):,} videos,"
    result = common.result_of("bench video", settings, rows)
    common.present(result, options, loader_title(samples, settings), loader_columns("frames", RIVALS))
    common.require_measured(rows, row_name)
    return result


def _rows(options: VideoBench, counts: list[int]) -> list[dict[str, Any]]:
    counts_of_decoders = common.integers(options.decoders or "1")
    if not counts_of_decoders or counts_of_decoders[0] < 1:
        raise UsageError(
            f"--decoders must be numbers of decoders such as 1,4,7, not {options.decoders!r}: at least 1 each"
        )
    decoders = counts_of_decoders if options.decoders else [None]
    rows = [
        row | {"decoders": count}
        for row in loader_rows(options, counts)
        if row["loader"] != "reader" or row["gpus"]
        for count in (decoders if row["loader"] == "raydali" else [None])
    ]
    if not rows:
        raise UsageError(f"--loaders {options.loaders} needs a GPU, and --gpus names none: add raydali or pyav")
    return rows


# Code of the processes that measure. Slow imports are inside the functions.


@dataclass(frozen=True, kw_only=True)
class VideoTask(Task):
    """The measurement of a loader of clips by one process; a batch has `batch_size` clips.

    Attributes:
        sequence_length: frames per clip.
        stride: distance from one frame of a clip to the next.
        decoders: number of raydali's decoders on a GPU; None for the default.
    """

    sequence_length: int
    stride: int
    decoders: int | None = None

    def batches(self) -> Batches:
        """Start the loader and generate its batches."""
        return {"raydali": _raydali, "reader": _reader, "pyav": _pyav}[self.loader](self)

    def clips(self) -> "VideoClips":
        """Find the clips of the videos below the root."""
        from raydali.data.video.clips import VideoClips

        return VideoClips.scan(self.root, sequence_length=self.sequence_length, stride=self.stride)


def _raydali(task: VideoTask) -> Batches:
    import torch

    from raydali.data.load.make import make_video_loader
    from raydali.data.video.task import TrainClips

    if task.gpu:
        torch.cuda.set_device(task.device)
    clips, crops = task.clips(), TrainClips(seed=0, image_size=task.image_size, resize_size=task.image_size)
    where: Any = {"rank": task.rank, "world_size": task.world_size, "device": task.device, "threads": task.threads}
    order = task.endless(len(clips))
    with make_video_loader("dali", clips, crops, order, decoders=task.decoders, **where) as loader:
        yield from task.normalise(loader, "clips")


def _reader(task: VideoTask) -> Batches:
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


def squares(task: VideoTask, clips: Any) -> Any:
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


class Square(NamedTuple):
    """A crop of a clip's frames: a square in pixels of the video, mirrored or not."""

    top: int
    left: int
    side: int
    mirrored: bool


def _pyav(task: VideoTask) -> Batches:
    import numpy as np
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
            frames = torch.from_numpy(read_by_pyav(clips, id, random_square(clips, id), task.image_size))
            if task.normalised:
                frames = frames.float().sub_(mean).div_(std)
            return frames, int(clips.labels(np.array([id]))[0])

    return task.data_loader(Clips())


def random_square(clips: "VideoClips", id: int) -> Square:
    """Draw a square as `TrainClips` does, from torch's random numbers, at even positions as colors are coded."""
    import numpy as np
    import torch

    (shape,) = clips.upright_shapes[clips.places(np.array([id]))[0]]
    side = int(shape.min())
    top, left = (int(draw * (length - side)) // 2 * 2 for draw, length in zip(torch.rand(2), shape, strict=True))
    return Square(top, left, side, bool(torch.randint(2, ())))


def read_by_pyav(clips: "VideoClips", id: int, square: Square, size: int) -> Any:
    """Read a clip (frames, size, size, 3), uint8, of a video with a constant frame rate.

    FFmpeg's filters crop before they resize and convert.
    """
    import av
    import numpy as np

    (video,), (first,) = (part.tolist() for part in clips.places(np.array([id])))
    wanted = np.minimum(first + clips.stride * np.arange(clips.sequence_length), clips.table.frames[video] - 1).tolist()
    opened: Any = av.open(clips.videos.path(video))
    with opened as container:
        stream = container.streams.video[0]
        graph: Any = av.filter.Graph()
        graph.link_nodes(
            graph.add_buffer(template=stream),
            *map(graph.add, compress(("transpose", "vflip", "hflip"), clips.orientation(id))),
            graph.add("crop", f"{square.side}:{square.side}:{square.left}:{square.top}"),
            graph.add("scale", f"{size}:{size}:flags=bilinear"),
            graph.add("format", "rgb24"),
            graph.add("hflip" if square.mirrored else "null"),
            graph.add("buffersink"),
        ).configure()
        step = 1 / (stream.average_rate * stream.time_base)
        begin = stream.start_time or 0
        container.seek(int(begin + wanted[0] * step), stream=stream)
        images = {}
        for frame in container.decode(stream):
            place = round((frame.pts - begin) / step)
            if place in wanted:
                graph.push(frame)
                images[place] = graph.pull().to_ndarray()
            if place >= wanted[-1]:
                break
    return np.stack([images[place] for place in wanted])
