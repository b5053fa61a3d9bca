"""Clips through the loaders: DALI's pixels against PyAV's, and the stream's promises for videos."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from raydali.data.broken.quarantine import Quarantine
from raydali.data.load.loader import Loader
from raydali.data.load.make import make_video_loader
from raydali.data.read.reading import Backoff
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.video.clips import VideoClips
from raydali.data.video.task import Clips, TrainClips, ValidationClips
from raydali.errors import DataError
from tests.support.quick import first_quick
from tests.support.videos import (
    ROTATIONS,
    Rotation,
    decoded_by_pyav,
    filtered_by_ffmpeg,
    moving,
    uneven,
    upright_by_ffmpeg,
    write_video,
)

CENTRE = ValidationClips(image_size=32, resize_size=40)
WHOLE = ValidationClips(image_size=48, resize_size=48)
AUGMENT = TrainClips(image_size=32, resize_size=40, seed=7)

# Name, codec, frames, times.
VIDEOS: list[tuple[str, str, int, list[int] | None]] = [
    ("a/1.webm", "vp9", 33, None),
    ("a/2.avi", "mjpeg", 21, None),
    ("a/variable.mkv", "mjpeg", 26, uneven(26)),
    ("b/1.mkv", "vp8", 40, None),
    ("b/2.mp4", "vp9", 28, None),
    ("b/short.webm", "vp9", 5, None),
    ("b/variable.webm", "vp8", 30, uneven(30)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for i, (name, codec, frames, times) in enumerate(VIDEOS):
        write_video(folder / name, moving(frames, start=17 * i), codec, milliseconds=times)
    return folder


@pytest.fixture(scope="module")
def clips(root: Path) -> VideoClips:
    return VideoClips.scan(str(root), sequence_length=4, stride=2)


def ordered(clips: VideoClips, pipeline: Clips, name: Any = "dali", **options: Any) -> Loader:
    order = OrderedPass(samples=len(clips), batch_size=4)
    return make_video_loader(name, clips, pipeline, order, **{"threads": 2} | options)


def all_clips(loader: Loader) -> torch.Tensor:
    with loader:
        return torch.cat([batch["clips"] for batch in loader])


def difference(clips: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (clips.int() - others.int()).abs()


def test_dali_s_frames_are_pyav_s(clips: VideoClips) -> None:
    with ordered(clips, WHOLE) as loader:
        for batch in loader:
            videos, firsts = clips.places(batch.ids)
            np.testing.assert_array_equal(batch["labels"].numpy(), clips.videos.labels[videos])
            for clip, video, first in zip(batch["clips"], videos.tolist(), firsts.tolist(), strict=True):
                straight = decoded_by_pyav(Path(clips.videos.path(video)))
                wanted = straight[np.minimum(first + 2 * np.arange(4), len(straight) - 1)][:, :, 8:56]
                assert clip.dtype == torch.uint8 and clip.shape == (3, 4, 48, 48)
                np.testing.assert_array_equal(clip.permute(1, 2, 3, 0).numpy(), wanted, err_msg=clips.path(video))


@pytest.mark.parametrize("pipeline", [CENTRE, AUGMENT], ids=["centre", "augment"])
def test_both_loaders_deliver_the_same_pixels(clips: VideoClips, pipeline: Clips) -> None:
    ours, theirs = (all_clips(ordered(clips, pipeline, name)) for name in ("dali", "torch"))
    assert ours.equal(theirs)


@pytest.mark.parametrize("shape", [(40, 96), (90, 40)], ids=["wide", "tall"])
@pytest.mark.parametrize("codec", ["mjpeg", "h264"])
def test_clips_are_those_of_ffmpeg_s_filters(tmp_path: Path, codec: str, shape: tuple[int, int]) -> None:
    """Bit for bit, but that filters know on which side of four pixels the colours of H.264 lie: at most 6 of 255.

    Frames that become RGB before they are resized differ by at most 10 of 255, and by 0.5 on average.
    """
    path = write_video(tmp_path / "a" / "1.mkv", moving(8, height=shape[0], width=shape[1]), codec)
    source = VideoClips.scan(str(tmp_path), sequence_length=8)
    high, wide = (40 * np.array(shape) // min(shape)).tolist()
    top, left = np.rint((np.array([high, wide]) - 32) / 2).astype(int).tolist()
    filters = ("scale", f"{wide}:{high}:flags=bilinear+accurate_rnd+full_chroma_int"), ("format", "rgb24")
    resized = filtered_by_ffmpeg(path, *filters)[:, top : top + 32, left : left + 32]
    clip, label = CENTRE.sample(source, 0, 0)
    assert clip.shape == (3, 8, 32, 32) and label == 0
    apart = difference(clip, torch.from_numpy(resized).permute(3, 0, 1, 2))
    assert apart.max() <= (6 if codec == "h264" else 0)
    assert all_clips(ordered(source, CENTRE))[0].equal(clip)
    late = torch.from_numpy(decoded_by_pyav(path)).permute(0, 3, 1, 2)
    late = interpolate(late, (high, wide), mode="bilinear", antialias=True)[..., top : top + 32, left : left + 32]
    apart = difference(clip, late.transpose(0, 1))
    assert apart.max() <= 10 and apart.float().mean() < 0.5


@first_quick("name", ["dali", "torch"])
@first_quick("rotation", ROTATIONS)
def test_rotated_frames_are_ffmpeg_s_upright_ones(tmp_path: Path, rotation: Rotation, name: str) -> None:
    path = write_video(tmp_path / "a" / "1.mp4", moving(8), "h264", rotation=rotation)
    source = VideoClips.scan(str(tmp_path), sequence_length=8)
    upright = upright_by_ffmpeg(path)
    height, width = upright.shape[1:3]
    upright = upright[:, (height - 48) // 2 :][:, :48, (width - 48) // 2 :][:, :, :48]
    frames = all_clips(ordered(source, WHOLE, name))[0].permute(1, 2, 3, 0).numpy()
    np.testing.assert_array_equal(frames, upright)


@first_quick("pipeline", [CENTRE, AUGMENT], ids=["centre", "augment"])
@first_quick("shape", [(48, 96), (97, 51)], ids=["wide", "odd"])
def test_crops_and_flips_refer_to_the_upright_clip(tmp_path: Path, pipeline: Clips, shape: tuple[int, int]) -> None:
    """Clips of rotated videos equal those of the same frames that are stored upright."""
    for i, rotation in enumerate(ROTATIONS):
        path = tmp_path / "rotated" / "a" / f"{i}.mov"
        write_video(path, moving(12, height=shape[0], width=shape[1]), "mjpeg", rotation=rotation)
        write_video(tmp_path / "upright" / "a" / f"{i}.mkv", upright_by_ffmpeg(path), "ffv1")
    rotated, upright = (VideoClips.scan(str(tmp_path / name), sequence_length=4) for name in ("rotated", "upright"))
    assert len(rotated) == len(upright) == 3 * len(ROTATIONS)
    ours, theirs = (all_clips(ordered(source, pipeline)) for source in (rotated, upright))
    apart = difference(ours, theirs)  # the upright frames became RGB before they are resized
    assert apart.max() <= 10 and apart.float().mean() < 0.5


def test_random_crops_depend_on_seed_epoch_and_id_alone(clips: VideoClips) -> None:
    ids, epochs = np.arange(10), np.zeros(10, np.int64)
    crops = AUGMENT.crops(clips, ids, epochs)
    backwards = AUGMENT.crops(clips, ids[::-1], epochs)
    np.testing.assert_array_equal(crops.starts, backwards.starts[::-1])
    np.testing.assert_array_equal(crops.flips, backwards.flips[::-1])
    assert (crops.starts >= 0).all() and (crops.starts + 32 <= crops.resized).all()
    others = [
        AUGMENT.crops(clips, ids, epochs + 1),
        TrainClips(image_size=32, resize_size=40, seed=8).crops(clips, ids, epochs),
    ]
    assert all((other.starts != crops.starts).any() for other in others)
    assert set(AUGMENT.crops(clips, np.arange(30) % len(clips), np.arange(30)).flips.tolist()) == {0, 1}


# ---------------------------------------------------------------------------------------------------------------------
# Loaders


def stream(clips: VideoClips) -> Stream:
    return Stream(samples=len(clips), epochs=2, batch_size=2, global_batch_size=6, seed=5)


def test_a_pass_again_after_breaking_off(clips: VideoClips) -> None:
    with make_video_loader("dali", clips, AUGMENT, stream(clips), threads=2) as loader:
        cut_short = [batch for _, batch in zip(range(5), loader, strict=False)]
        assert loader.state_dict() == stream(clips).state(1)
        whole = list(loader)
    assert len(whole) == 3 * stream(clips).steps
    for batch, other in zip(cut_short, whole, strict=False):
        np.testing.assert_array_equal(batch.ids, other.ids)
        assert batch["clips"].equal(other["clips"]) and batch["labels"].equal(other["labels"])


def test_validation_covers_each_clip_with_a_smaller_last_batch(clips: VideoClips) -> None:
    ids = []
    for rank in range(2):
        with ordered(clips, CENTRE, rank=rank, world_size=2) as loader:
            for _ in range(2):
                batches = list(loader)
            ids += [id for batch in batches for id in batch.ids.tolist()]
            assert all(len(batch["clips"]) == len(batch.ids) for batch in batches)
    assert sorted(ids) == list(range(len(clips)))


def test_a_resident_batch_is_like_the_others(clips: VideoClips) -> None:
    with ordered(clips, CENTRE) as loader:
        resident, batch = loader.resident_batch(4), next(iter(loader))
        for name, tensor in batch.tensors.items():
            assert (resident[name].shape, resident[name].dtype) == (tensor.shape, tensor.dtype)
        assert resident["clips"].stride() == batch["clips"].stride()
        assert batch["clips"].is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_a_video_that_breaks_behind_the_index_is_named(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / "a" / "1.webm", moving(24), "vp9")
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    path.write_bytes(path.read_bytes()[:900])
    with ordered(source, CENTRE, name) as loader, pytest.raises(DataError, match=str(path)):
        list(loader)


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_frames_that_do_not_decode_are_named(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / "a" / "1.avi", moving(12), "mjpeg")
    content = path.read_bytes()
    starts = [i - 8 for i in range(len(content)) if content.startswith(b"\xff\xd8\xff", i)][4:8]
    damaged = bytearray(content)
    for start in starts:
        size = int.from_bytes(content[start + 4 : start + 8], "little")
        damaged[start + 8 : start + 8 + size] = bytes(size)
    path.write_bytes(bytes(damaged))
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    with ordered(source, CENTRE, name) as loader, pytest.raises(DataError, match=rf"{path} \(from frame 4\)"):
        list(loader)


def test_a_clip_that_fails_to_decode_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "pause", lambda *_: pytest.fail("waited for the storage"))
    path = write_video(tmp_path / "a" / "1.webm", moving(24), "vp9")
    write_video(tmp_path / "a" / "2.webm", moving(24), "vp9")
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    path.write_bytes(path.read_bytes()[:900])
    order = OrderedPass(samples=len(source), batch_size=4)
    with make_video_loader(
        "dali", source, CENTRE, order, quarantine=lambda _: Quarantine(len(source), seed=0)
    ) as loader:
        batches = list(loader)
        assert loader.quarantine.known and set(loader.quarantine.known) <= set(range(6))
    assert sum(len(batch.ids) for batch in batches) == 12
    assert not {*loader.quarantine.known} & {id for batch in batches for id in batch.micro_batch.read_ids.tolist()}
