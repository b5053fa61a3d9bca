"""The source of clips: how videos are counted and cut, and that a cut holds the frames that were asked for."""

import logging
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from raydali.data.index.file_list import FileList
from raydali.data.index.labeled import LabeledFiles
from raydali.data.video.clips import VideoClips
from raydali.data.video.packets import read_clip_packets, read_video_info
from raydali.data.video.task import decoded, rgb_clip
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.quick import first_quick
from tests.support.videos import COLOURS, alternate_references, decoded_by_pyav, moving, uneven, write_video

CONTAINERS = [
    ("vp8", "webm"),
    ("vp9", "webm"),
    ("vp9", "mp4"),
    ("vp9", "ivf"),
    ("mjpeg", "avi"),
    ("mjpeg", "mov"),
    ("h264", "mp4"),
    ("h264", "mkv"),
    ("h264", "ts"),
]
ORDERS = {
    "b-frames": "bframes=3:b-adapt=0:b-pyramid=normal:scenecut=0:open-gop=0",
    "open-gops": "bframes=3:b-adapt=0:open-gop=1:scenecut=0",
}


def scan(root: Path, **options: Any) -> VideoClips:
    return VideoClips.scan(str(root), **{"sequence_length": 4} | options)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    write_video(root / "a" / "1.avi", moving(11), "mjpeg")
    write_video(root / "a" / "2.webm", moving(3), "vp9")
    write_video(root / "b" / "1.mp4", moving(24), "h264")
    return root


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, [(0, 0), (0, 4), (1, 0), (2, 0), (2, 4), (2, 8), (2, 12), (2, 16), (2, 20)]),
        ({"stride": 3}, [(0, 0), (1, 0), (2, 0), (2, 10)]),
        ({"stride": 2, "step": 2}, [(0, 0), (0, 2), (0, 4), (1, 0), *((2, first) for first in range(0, 18, 2))]),
        ({"sequence_length": 24}, [(0, 0), (1, 0), (2, 0)]),
        ({"sequence_length": 1, "step": 10}, [(0, 0), (0, 10), (1, 0), (2, 0), (2, 10), (2, 20)]),
    ],
)
def test_a_video_is_cut_into_clips(videos: Path, options: dict[str, Any], places: list[tuple[int, int]]) -> None:
    clips = scan(videos, **options)
    ids = np.arange(len(clips))
    found, firsts = clips.places(ids)
    assert list(zip(found.tolist(), firsts.tolist(), strict=True)) == places
    np.testing.assert_array_equal(clips.labels(ids), clips.videos.labels[found])
    assert clips.table.frames.tolist() == [11, 3, 24]
    assert clips.path(len(clips) - 1) == f"{videos}/b/1.mp4 (from frame {places[-1][1]})"


def test_the_fingerprint_is_that_of_the_clips_wherever_they_lie(videos: Path) -> None:
    clips = scan(videos)
    assert clips.relocate("/elsewhere").fingerprint == clips.fingerprint
    assert clips.relocate("/elsewhere").path(0).startswith("/elsewhere/a/1.avi")
    others = [scan(videos, **options) for options in ({"stride": 2}, {"step": 5}, {"sequence_length": 5})]
    assert len({clips.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_videos_of_a_list(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("b/1.mp4,late\na/1.avi,early\n")
    clips = VideoClips.index(FileList.from_file(f"{tmp_path}/list.csv", root=str(videos)), sequence_length=11)
    assert clips.videos.classes == ("early", "late")
    assert clips.labels(np.arange(len(clips))).tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["sequence_length", "stride", "step"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--{name.replace('_', '-')} 1 0")):
        scan(Path("/nowhere"), **{name: 0})


# ---------------------------------------------------------------------------------------------------------------------
# Frames


def assert_frames(path: Path, frames: int) -> None:
    """All clips of some kinds hold what PyAV decodes straight through."""
    facts, straight = read_video_info(str(path)), decoded_by_pyav(path)
    assert facts.frames == len(straight) == frames
    assert (facts.height, facts.width) == straight.shape[1:3]
    for length, stride in ((3, 1), (5, 4)):
        for first in range(0, frames, 3):
            wanted = np.minimum(first + stride * np.arange(length), frames - 1)
            with read_clip_packets(str(path), facts, first, stride, length) as found:
                clip = decoded(found, lambda frame: frame.to_ndarray(format="rgb24", interpolation=COLOURS))
            np.testing.assert_array_equal(np.stack(clip), straight[wanted], err_msg=f"{path} from {first} by {stride}")


@first_quick(("codec", "container"), CONTAINERS)
@first_quick("rate", ["constant", "variable"])
def test_a_cut_holds_the_clip_s_frames(tmp_path: Path, codec: str, container: str, rate: str) -> None:
    milliseconds = None if rate == "constant" or container == "avi" else uneven(29)
    assert_frames(write_video(tmp_path / f"1.{container}", moving(29), codec, milliseconds=milliseconds), 29)


@pytest.mark.parametrize("name", ORDERS)
def test_frames_that_are_not_coded_in_order(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / "1.mp4", moving(41), "h264", keyframe_every=10, options={"x264-params": ORDERS[name]})
    # An open GOP's first frames are decoded behind its keyframe, and need the GOP before.
    keys = [0, 10, 20, 30, 40] if name == "b-frames" else [0, 9, 19, 29, 39]
    assert read_video_info(str(path)).key_frames.tolist() == keys
    assert_frames(path, 41)


@first_quick("container", ["mkv", "ts", "mov"])
@first_quick("name", ORDERS)
def test_frames_out_of_order_in_other_containers(tmp_path: Path, name: str, container: str) -> None:
    options = {"x264-params": ORDERS[name]}
    path = write_video(tmp_path / f"1.{container}", moving(41), "h264", keyframe_every=10, options=options)
    assert_frames(path, 41)


@pytest.mark.parametrize("codec", ["vp8", "vp9"])
def test_frames_that_are_decoded_and_never_shown(codec: str) -> None:
    path = alternate_references(codec)
    with av.open(str(path)) as container:
        packets = sum(packet.size > 0 for packet in container.demux(video=0))
    assert packets == (63 if codec == "vp8" else 60)  # VP9 packs them with the next one that is shown
    assert_frames(path, 60)


def test_an_avi_without_its_index(tmp_path: Path) -> None:
    path = write_video(tmp_path / "1.avi", moving(15), "mjpeg")
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"idx1")])
    assert_frames(path, 15)


def test_a_webm_that_was_streamed(tmp_path: Path) -> None:
    assert_frames(write_video(tmp_path / "1.webm", moving(30), "vp9", container_options={"live": "1"}), 30)


@pytest.mark.parametrize("container", ["mp4", "mkv", "mov"])
def test_a_cut_is_found_by_seeking(tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"x264-params": ORDERS["b-frames"]}
    path = write_video(tmp_path / f"1.{container}", moving(60), "h264", options=options)
    # Where seeking fails, a video is read from its start.
    monkeypatch.delattr("raydali.data.video.packets._from_start")
    assert_frames(path, 60)


def test_frames_that_nothing_is_decoded_from_are_left_out(tmp_path: Path) -> None:
    options = {"x264-params": "bframes=3:b-adapt=0:b-pyramid=0:scenecut=0"}
    path = write_video(tmp_path / "1.mp4", moving(41), "h264", keyframe_every=40, options=options)
    facts = read_video_info(str(path))
    with read_clip_packets(str(path), facts, 36, 1, 4) as found:
        assert len(found.packets) == 9 + 4  # of those before it every fourth
    with read_clip_packets(str(path), facts, 0, 8, 5) as found:
        assert len(found.packets) == 9


def test_a_cut_is_small_wherever_the_clip_lies(tmp_path: Path) -> None:
    path = write_video(tmp_path / "1.mp4", moving(60), "h264", options={"x264-params": "scenecut=0"})
    facts = read_video_info(str(path))
    assert facts.key_frames.tolist() == [0, 12, 24, 36, 48]
    for first, packets in ((0, 4), (36, 4), (53, 9)):
        with read_clip_packets(str(path), facts, first, 1, 4) as found:
            # A frame that is shown before another may be decoded behind it.
            assert packets <= len(found.packets) <= packets + 4


def test_videos_in_a_bucket_are_those_on_the_disk(videos: Path, s3: PutObjects) -> None:
    s3("video-bucket", {f"train/{path.relative_to(videos)}": path.read_bytes() for path in videos.glob("*/*")})
    local, remote = scan(videos), VideoClips.scan("s3://video-bucket/train", sequence_length=4)
    assert remote.fingerprint == local.fingerprint
    for id in range(len(local)):
        np.testing.assert_array_equal(rgb_clip(remote, id), rgb_clip(local, id))
    moved = remote.relocate("s3://video-bucket/elsewhere")
    with pytest.raises(OSError, match=mentioning("0 s3://video-bucket/elsewhere/a/1.avi")):
        rgb_clip(moved, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Short and broken


def test_short_videos_repeat_their_last_frame_with_a_warning(videos: Path, caplog: pytest.LogCaptureFixture) -> None:
    clips = scan(videos, stride=4)
    assert mentions(caplog.text, "2 3 videos 13 frames")
    frames = rgb_clip(clips, 1)
    assert not np.array_equal(frames[0], frames[1]) and (frames[2:] == frames[1]).all()
    caplog.clear()
    scan(videos, sequence_length=3)
    assert not caplog.records


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = tmp_path / "broken"
    write_video(root / "a" / "good.mp4", moving(20), "h264")
    write_video(root / "b" / "also good.webm", moving(20), "vp9")
    (root / "a" / "empty.mp4").touch()
    (root / "a" / "page.mp4").write_text("<html>not found</html>" * 99)
    for name, options in (("cut off.mp4", {}), ("cut off behind its index.mp4", {"movflags": "faststart"})):
        path = write_video(root / "b" / name, moving(20), "h264", container_options=options)
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    return root


def test_broken_videos_are_refused_by_name(broken: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("4 6 --skip-broken a/empty.mp4")) as error:
        scan(broken)
    for name in ("a/page.mp4", "b/cut off.mp4", "b/cut off behind its index.mp4"):
        assert f"{broken}/{name}" in str(error.value)
    assert "good" not in str(error.value)


def test_broken_videos_are_left_out_where_asked(broken: Path, caplog: pytest.LogCaptureFixture) -> None:
    clips = scan(broken, skip_broken=True)
    assert [clips.videos.path(id) for id in range(2)] == [f"{broken}/a/good.mp4", f"{broken}/b/also good.webm"]
    assert clips.videos.labels.tolist() == [0, 1] and clips.videos.classes == ("a", "b")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert mentions(caplog.text, "4 6 videos") and "page.mp4" in caplog.text
    for path in broken.glob("*/*good*"):
        path.unlink()
    with pytest.raises(UsageError, match=mentioning("4 of 4 broken")):
        scan(broken, skip_broken=True)


def test_many_broken_videos_are_counted_and_some_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(9):
        (tmp_path / "a" / f"{i}.mp4").touch()
    with pytest.raises(UsageError, match=mentioning("9 /4.mp4 4")):
        scan(tmp_path)


def test_a_video_that_changed_behind_the_index_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a" / "1.mp4", moving(40), "h264")
    clips = scan(tmp_path)
    write_video(path, moving(10), "h264")
    with pytest.raises(OSError, match=mentioning(f"{path} frame 36 index")):
        rgb_clip(clips, 9)
    path.unlink()
    with pytest.raises(OSError, match=mentioning(f"{path} frame 0")):
        rgb_clip(clips, 0)


def test_folders_without_videos_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match=mentioning("videos 1 .mp4")):
        scan(tmp_path)


def test_the_index_takes_any_labelled_files(videos: Path) -> None:
    files = LabeledFiles.from_list(str(videos), ["b/1.mp4"], labels=np.array([0]), classes=("b",))
    assert len(VideoClips.index(files, sequence_length=8)) == 3
