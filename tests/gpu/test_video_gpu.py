"""Clips on a GPU: what its video engines decode is what PyAV decodes, whatever the number of decoders."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydali.data.load.make import make_video_loader, video_engines
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.video.clips import VideoClips
from raydali.data.video.task import TrainClips, ValidationClips
from tests.support.cluster import finished_run
from tests.support.traces import read_samples
from tests.support.videos import (
    ROTATIONS,
    Rotation,
    alternate_references,
    decoded_by_pyav,
    moving,
    uneven,
    upright_by_ffmpeg,
    write_video,
)

pytestmark = pytest.mark.gpu

HEIGHT, WIDTH = 144, 256
"""No engine decodes frames much smaller: VP9's limit is 128 x 128."""
MEAN_TOLERANCE, FAR, FAR_SHARE = 2.0, 12, 0.003
"""Of 255: rounding and how colours, coded at half the size, are brought to full size. MPEG-4's change most from pixel
to pixel: of one clip 0.258% are farther away with FFmpeg's planes too. A frame's neighbour is 9 away on average, so
another frame cannot pass for it."""

VIDEOS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "h264": ("mp4", "h264", {}),
    "h264-variable": ("mp4", "h264", {"milliseconds": uneven(31)}),
    "h264-b-frames": ("mp4", "h264", {"options": {"x264-params": "bframes=3:b-adapt=0:scenecut=0"}}),
    "h264-open-gops": ("mp4", "h264", {"options": {"x264-params": "bframes=3:b-adapt=0:open-gop=1:scenecut=0"}}),
    "h264-mkv": ("mkv", "h264", {}),
    "h264-ts": ("ts", "h264", {}),
    "hevc": ("mp4", "hevc", {}),
    "mpeg4": ("avi", "mpeg4", {}),
    "vp9": ("webm", "vp9", {}),
    "vp8": ("webm", "vp8", {}),
    "mjpeg": ("avi", "mjpeg", {}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for i in range(6):
        frames = moving(40 + i, height=HEIGHT, width=WIDTH, start=19 * i)
        write_video(folder / str(i % 2) / f"{i}.mp4", frames, "h264")
    return folder


@pytest.mark.parametrize(("length", "stride"), [(4, 1), (4, 5), (40, 1)], ids=["clips", "strided", "short"])
@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_pyav_s(tmp_path: Path, name: str, length: int, stride: int) -> None:
    ending, codec, options = VIDEOS[name]
    path = write_video(
        tmp_path / "a" / f"1.{ending}", moving(31, height=HEIGHT, width=WIDTH), codec, keyframe_every=10, **options
    )
    clips = VideoClips.scan(str(tmp_path), sequence_length=length, stride=stride, step=3)
    straight = decoded_by_pyav(path)[:, :, 56:200].astype(np.int64)
    assert_like(clips, straight, ValidationClips(image_size=HEIGHT, resize_size=HEIGHT))


def assert_like(clips: VideoClips, straight: Any, whole: ValidationClips) -> None:
    """All clips are those frames of a single video, within the tolerance."""
    order = OrderedPass(samples=len(clips), batch_size=4)
    with make_video_loader("dali", clips, whole, order, device="cuda", threads=4) as loader:
        for batch in loader:
            for clip, first in zip(batch["clips"], clips.places(batch.ids)[1].tolist(), strict=True):
                wanted = np.minimum(first + clips.stride * np.arange(clips.sequence_length), len(straight) - 1)
                apart = np.abs(clip.permute(1, 2, 3, 0).cpu().numpy() - straight[wanted])
                figures = f"mean {apart.mean():.2f}, {(apart > FAR).mean():.4%} above {FAR}, from frame {first}"
                assert apart.mean((1, 2, 3)).max() < MEAN_TOLERANCE and (apart > FAR).mean() < FAR_SHARE, figures


@pytest.mark.parametrize("codec", ["vp8", "vp9"])
def test_frames_that_are_decoded_and_never_shown(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a").mkdir()
    path = shutil.copy(alternate_references(codec), tmp_path / "a")
    clips = VideoClips.scan(str(tmp_path), sequence_length=4, step=3)
    straight = decoded_by_pyav(Path(path))[:, :, 8:152].astype(np.int64)
    assert_like(clips, straight, ValidationClips(image_size=HEIGHT, resize_size=HEIGHT))


@pytest.mark.parametrize(("ending", "codec"), [("mp4", "h264"), ("mov", "mjpeg")], ids=["engines", "ffmpeg"])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotated_frames_are_ffmpeg_s_upright_ones(tmp_path: Path, rotation: Rotation, ending: str, codec: str) -> None:
    frames = moving(31, height=HEIGHT, width=WIDTH)
    path = write_video(tmp_path / "a" / f"1.{ending}", frames, codec, keyframe_every=10, rotation=rotation)
    clips = VideoClips.scan(str(tmp_path), sequence_length=4, step=3)
    straight = upright_by_ffmpeg(path).astype(np.int64)
    straight = straight[:, :, 56:200] if straight.shape[1] == HEIGHT else straight[:, 56:200]
    assert_like(clips, straight, ValidationClips(image_size=HEIGHT, resize_size=HEIGHT))


def assert_crops_are_the_cpu_s(clips: VideoClips, decoders: int | None = None) -> None:
    stream = Stream(samples=len(clips), epochs=3, batch_size=3, global_batch_size=3, seed=1)
    augment = TrainClips(image_size=112, resize_size=128, seed=2)
    where: dict[str, Any] = {"device": "cuda", "threads": 4, "decoders": decoders}
    with make_video_loader("dali", clips, augment, stream, **where) as loader:
        for batch in loader:
            samples = zip(batch["clips"], batch.ids.tolist(), batch.micro_batch.epochs.tolist(), strict=True)
            for clip, id, epoch in samples:
                theirs, _ = augment.sample(clips, id, epoch)
                assert (clip.cpu().int() - theirs.int()).abs().float().mean() < MEAN_TOLERANCE, clips.path(id)


def test_crops_of_rotated_videos_are_the_cpu_s(tmp_path: Path) -> None:
    for i, rotation in enumerate(ROTATIONS):
        path = tmp_path / "a" / f"{i}.mp4"
        write_video(path, moving(12, height=HEIGHT, width=WIDTH, start=9 * i), "h264", rotation=rotation)
    assert_crops_are_the_cpu_s(VideoClips.scan(str(tmp_path), sequence_length=4))


def test_one_decoder_takes_videos_of_all_sizes(tmp_path: Path) -> None:
    sizes = [(144, 256), (240, 320), (144, 192), (360, 480), (144, 144)]
    for i, (height, width) in enumerate(sizes):
        write_video(tmp_path / "a" / f"{i}.mp4", moving(12, height=height, width=width, start=9 * i), "h264")
    assert_crops_are_the_cpu_s(VideoClips.scan(str(tmp_path), sequence_length=4), decoders=1)


def test_several_decoders_hand_out_the_batches_of_one(root: Path) -> None:
    clips = VideoClips.scan(str(root), sequence_length=4)
    stream = Stream(samples=len(clips), epochs=2, batch_size=4, global_batch_size=8, seed=1)
    augment = TrainClips(image_size=112, resize_size=128, seed=2)
    runs = []
    for decoders in (1, None):
        where: dict[str, Any] = {"device": "cuda", "threads": 8, "decoders": decoders}
        with make_video_loader("dali", clips, augment, stream, start=3, **where) as loader:
            runs.append([(batch.ids, batch["clips"].clone(), batch["labels"].clone()) for batch in loader])
    assert len(runs[0]) == 2 * (stream.steps - 3)
    for (ids, pixels, labels), (other_ids, other_pixels, other_labels) in zip(*runs, strict=True):
        np.testing.assert_array_equal(ids, other_ids)
        assert pixels.equal(other_pixels) and labels.equal(other_labels)
        assert pixels.dtype == torch.uint8 and pixels.is_contiguous(memory_format=torch.channels_last_3d)
    clip, _ = augment.sample(clips, int(runs[0][0][0][0]), 0)
    assert (runs[0][0][1][0].cpu().int() - clip.int()).abs().float().mean() < 4


@pytest.mark.timeout(400)
def test_the_job_learns_the_demo_on_a_gpu(tmp_path: Path) -> None:
    options = ["--gpu", "--workers", "1", "--precision", "bf16", "--global-batch-size", "16", "--trace-samples"]
    folder = finished_run(tmp_path, "one", *options, script="jobs/video.py")
    assert folder.rows("epochs.jsonl")[-1]["validation"]["top1"] > 0.9
    assert len(read_samples(folder)) == 5 * 320


def test_the_driver_tells_how_many_engines_there_are() -> None:
    engines = video_engines("cuda")
    assert 1 <= engines <= 16
    if any(name in torch.cuda.get_device_name() for name in ("H100", "H200")):
        assert engines == 7
