"""The loaders of clips that are measured: ours, and the ways in which others read videos, as their users would.

    raydali      VideoClips in the stream's order, with some decoders on a GPU
    reader       one pipeline around DALI's own `fn.readers.video`, shuffled in its buffer: GPUs only
    pyav         torch's DataLoader: PyAV seeks, decodes and scales in worker processes
    torchcodec   the same with torchcodec, where it is installed

Each is an endless generator of batches of clips, frames scaled to `image_size` x `image_size` pixels, uint8 on the
device. It runs in a process of its own, so whatever is slow to import is imported inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydali.bench.loaders import EPOCHS, Deliveries, Measured, Task, endless
from raydali.data.video_clips import VideoClips

SHUFFLED_AT_ONCE = 16
"""Clips in the native reader's buffer: each is decoded."""


@dataclass(frozen=True, kw_only=True)
class VideoTask(Task):
    """What one process measures.

    Attributes:
        batch_size: clips of a batch.
        sequence_length: frames of a clip.
        stride: from one frame of a clip to its next.
        decoders: of raydali on a GPU; None for as many as by default.
    """

    sequence_length: int
    stride: int
    decoders: int | None = None

    @property
    def measured(self) -> Measured:
        """How the loader is measured."""
        return VIDEO_LOADERS[self.loader]

    def clips(self) -> VideoClips:
        """The clips of the videos below the root."""
        return VideoClips.scan(self.root, sequence_length=self.sequence_length, stride=self.stride)


def _raydali(task: Any) -> Deliveries:
    import torch

    from raydali.data.video import TrainClips
    from raydali.data.video_loader import make_video_loader

    if task.gpu:
        torch.cuda.set_device(task.device)
    clips = task.clips()
    order = endless(len(clips), task.batch_size, task.world_size)
    pipeline = TrainClips(seed=0, image_size=task.image_size, resize_size=task.image_size)
    where = {"rank": task.rank, "world_size": task.world_size, "device": task.device, "threads": task.threads}
    with make_video_loader("dali", clips, pipeline, order, decoders=task.decoders, **where) as loader:
        yield from loader


def _reader(task: Any) -> Deliveries:
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
        pipeline.set_outputs(fn.resize(clips, size=(task.image_size, task.image_size)), labels)
    pipeline.build()
    while True:
        yield pipeline.run()


def _pyav(task: Any) -> Deliveries:
    return _data_loader(task, _read_by_pyav)


def _torchcodec(task: Any) -> Deliveries:
    return _data_loader(task, _read_by_torchcodec)


def _data_loader(task: Any, read: Callable[[Any, VideoClips, int], Any]) -> Deliveries:
    import torch
    from torch.utils.data import DataLoader, Dataset, RandomSampler

    torch.set_num_threads(1)  # inherited by the workers: else each starts as many threads as there are cores
    clips = task.clips()

    class Clips(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return len(clips)

        def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
            video = int(clips.places(torch.tensor([id]).numpy())[0][0])
            return read(task, clips, id), int(clips.videos.labels[video])

    loader = DataLoader(
        Clips(),
        batch_size=task.batch_size,
        sampler=RandomSampler(range(len(clips)), num_samples=len(clips) * EPOCHS),
        num_workers=task.workers,
        multiprocessing_context="fork",  # what users get; processes that were spawned themselves would spawn
        persistent_workers=True,
        pin_memory=task.gpu,
        drop_last=True,
    )
    for clips_and_labels in loader:
        yield [tensor.to(task.device, non_blocking=True) for tensor in clips_and_labels]


def _frames_of(task: Any, clips: VideoClips, id: int) -> tuple[str, list[int]]:
    import numpy as np

    (video,), (first,) = (part.tolist() for part in clips.places(np.array([id])))
    wanted = np.minimum(first + task.stride * np.arange(task.sequence_length), clips.frames[video] - 1)
    return clips.videos.path(video), wanted.tolist()


def _read_by_pyav(task: Any, clips: VideoClips, id: int) -> Any:
    """Seek by time, at a constant frame rate."""
    import av
    import numpy as np
    import torch

    path, wanted = _frames_of(task, clips, id)
    opened: Any = av.open(path)
    with opened as container:
        stream = container.streams.video[0]
        step = 1 / (stream.average_rate * stream.time_base)
        begin = stream.start_time or 0
        container.seek(int(begin + wanted[0] * step), stream=stream)
        found = {}
        for frame in container.decode(stream):
            place = round((frame.pts - begin) / step)
            if place in wanted:
                found[place] = frame.to_ndarray(format="rgb24", width=task.image_size, height=task.image_size)
            if place >= wanted[-1]:
                break
    return torch.from_numpy(np.stack([found[place] for place in wanted]))


def _read_by_torchcodec(task: Any, clips: VideoClips, id: int) -> Any:
    from torch.nn.functional import interpolate
    from torchcodec.decoders import VideoDecoder

    path, wanted = _frames_of(task, clips, id)
    frames = VideoDecoder(path, num_ffmpeg_threads=1).get_frames_at(wanted).data
    return interpolate(frames, size=(task.image_size, task.image_size), mode="bilinear", antialias=True)


VIDEO_LOADERS = {
    "raydali": Measured(deliver=_raydali, all_queues=True),
    "reader": Measured(deliver=_reader),
    "pyav": Measured(deliver=_pyav, parallel=True),
    "torchcodec": Measured(deliver=_torchcodec, parallel=True, module="torchcodec"),
}
