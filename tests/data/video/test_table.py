"""The index of videos and its cache: each is opened once, and again when it has changed."""

import os
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.file_list import FileList
from raydali.data.video import table
from raydali.data.video.clips import VideoClips, scan_videos
from raydali.data.video.packets import VideoInfo, read_video_info
from raydali.data.video.table import VideoTable, video_table
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects
from tests.support.videos import moving, write_video

LENGTHS = {"a/1.avi": (11, "mjpeg"), "a/2.webm": (30, "vp9"), "b/1.mp4": (24, "h264"), "b/2.mp4": (7, "h264")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/raydali/videos"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the videos that were opened since it was last cleared."""
    names: list[str] = []

    def noted(path: str) -> VideoInfo:
        names.append("/".join(path.split("/")[-2:]))
        return read_video_info(path)

    monkeypatch.setattr(table, "read_video_info", noted)
    return names


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoded")
    for name, (frames, codec) in LENGTHS.items():
        write_video(root / name, moving(frames), codec)
    return root


@pytest.fixture
def videos(encoded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "videos"))


def index(root: Path | str) -> VideoTable:
    table, broken = video_table(scan_videos(str(root)))
    assert not broken
    return table


def assert_same(one: VideoTable, other: VideoTable) -> None:
    for field in fields(VideoTable):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)


def test_a_video_is_opened_once(videos: Path, opened: list[str]) -> None:
    first = index(videos)
    assert sorted(opened) == sorted(LENGTHS) and first.frames.tolist() == [11, 30, 24, 7]
    opened.clear()
    assert_same(index(videos), first)
    assert not opened


def test_what_is_new_or_changed_is_opened_alone(videos: Path, opened: list[str]) -> None:
    index(videos)
    opened.clear()
    write_video(videos / "a/0.mp4", moving(5), "h264")
    write_video(videos / "b/1.mp4", moving(9), "h264")
    os.utime(videos / "b/2.mp4", ns=(0, 1))
    (videos / "a/1.avi").unlink()
    changed = index(videos)
    assert sorted(opened) == ["a/0.mp4", "b/1.mp4", "b/2.mp4"]
    assert changed.frames.tolist() == [5, 30, 9, 7]
    opened.clear()
    assert_same(index(videos), changed)
    assert not opened
    os.environ["XDG_CACHE_HOME"] += "-other"
    assert_same(index(videos), changed)
    assert len(opened) == 4


def test_the_lists_of_a_root_share_what_is_known(videos: Path, opened: list[str], tmp_path: Path) -> None:
    def clips(name: str, lines: list[str]) -> VideoClips:
        (tmp_path / name).write_text("".join(f"{line},0\n" for line in lines))
        videos_of = FileList.from_file(str(tmp_path / name), root=str(videos))
        return VideoClips.index(videos_of, sequence_length=4)

    train, val = ["b/1.mp4", "a/2.webm"], ["a/1.avi", "b/2.mp4"]
    clips("train.csv", train)
    assert clips("val.csv", val).table.frames.tolist() == [11, 7]
    assert len(opened) == 4
    opened.clear()
    assert clips("train.csv", train).table.key_frames.tolist() == clips("train.csv", train).table.key_frames.tolist()
    assert clips("all.csv", [*val, *train, val[0]]).table.frames.tolist() == [11, 7, 24, 30, 11]
    assert not opened


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_damaged_cache_is_made_anew(videos: Path, opened: list[str], cache: Path, damage: bytes | None) -> None:
    whole = index(videos)
    (file,) = cache.glob("*.npz")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    file.write_bytes(bytes(content) if damage is None else damage)
    opened.clear()
    assert_same(index(videos), whole)
    assert len(opened) == 4
    opened.clear()
    assert_same(index(videos), whole)
    assert not opened


def test_a_cache_that_cannot_be_written_hinders_nobody(videos: Path, opened: list[str], cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where a folder is to be")
    whole = index(videos)
    assert_same(index(videos), whole)
    assert len(opened) == 8


def test_broken_videos_are_looked_into_each_time(videos: Path, opened: list[str]) -> None:
    (videos / "a/1.avi").write_bytes(b"no video")
    for _ in range(2):
        opened.clear()
        with pytest.raises(UsageError, match=mentioning("1 4 a/1.avi")):
            VideoClips.scan(str(videos), sequence_length=4)
    assert opened == ["a/1.avi"]
    clips = VideoClips.scan(str(videos), sequence_length=4, skip_broken=True)
    assert clips.table.frames.tolist() == [30, 24, 7] and clips.videos.path(0).endswith("a/2.webm")


def test_videos_in_a_bucket_are_opened_once(videos: Path, opened: list[str], s3: PutObjects) -> None:
    contents = {f"train/{name}": (videos / name).read_bytes() for name in LENGTHS}
    s3("index-bucket", contents)
    first = index("s3://index-bucket/train")
    assert len(opened) == 4
    opened.clear()
    assert_same(index("s3://index-bucket/train"), first)
    assert not opened
    import boto3

    boto3.client("s3").put_object(Bucket="index-bucket", Key="train/a/1.avi", Body=contents["train/b/2.mp4"])
    assert index("s3://index-bucket/train").frames.tolist() == [7, 30, 24, 7]
    assert opened == ["a/1.avi"]


def test_the_largest_of_a_codec_is_looked_for_once(videos: Path) -> None:
    write_video(videos / "b/3.mp4", moving(3, height=32, width=96), "h264")
    clips = VideoClips.scan(str(videos), sequence_length=4)
    assert clips.largest == {"h264": (48, 96), "mjpeg": (48, 64), "vp9": (48, 64)}
    assert clips.largest is clips.largest
