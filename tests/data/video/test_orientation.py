"""The orientation of videos: what their containers say, as FFmpeg reads it."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from raydali.data.video.clips import VideoClips
from raydali.data.video.packets import Orientation, read_video_info
from tests.support.videos import (
    ROTATIONS,
    UPRIGHT,
    Frames,
    Rotation,
    decoded_by_pyav,
    moving,
    upright_by_ffmpeg,
    write_video,
)

QUARTER: Rotation = (90, False, False)


def orientation(path: Path) -> Orientation:
    return read_video_info(str(path)).orientation


def turned(frames: Frames, orientation: Orientation) -> Frames:
    """These frames (F, H, W, 3), made upright."""
    frames = frames.swapaxes(1, 2) if orientation.transposed else frames
    frames = frames[:, ::-1] if orientation.rows else frames
    return frames[:, :, ::-1] if orientation.columns else frames


def patched(path: Path, box: bytes, offset: int, matrix: Sequence[float]) -> Path:
    """The video with another matrix in the header: a, b, c, d of ISO/IEC 14496-12, 6.2.2."""
    content = bytearray(path.read_bytes())
    at = content.index(box) + offset
    a, b, c, d = (round(value * 65536) for value in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("rotation", [UPRIGHT, *ROTATIONS])
def test_frames_are_turned_as_players_turn_them(tmp_path: Path, rotation: Rotation) -> None:
    path = write_video(tmp_path / "1.mp4", moving(3), "h264", rotation=rotation)
    np.testing.assert_array_equal(turned(decoded_by_pyav(path), orientation(path)), upright_by_ffmpeg(path))


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_a_rotation_is_counterclockwise(tmp_path: Path, quarters: int) -> None:
    upright = moving(3, height=64, width=48)
    stored = np.rot90(upright, -quarters, axes=(1, 2))
    path = write_video(tmp_path / "1.mkv", np.ascontiguousarray(stored), "ffv1", rotation=(90 * quarters, False, False))
    np.testing.assert_array_equal(turned(decoded_by_pyav(path), orientation(path)), upright)


def test_the_orientations_of_exif_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "1.mp4"
    found = {orientation(write_video(path, moving(2), "h264", rotation=each)) for each in [UPRIGHT, *ROTATIONS]}
    assert len(found) == 8


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("h264", "mp4"),
        ("h264", "mov"),
        ("h264", "mkv"),
        ("hevc", "mp4"),
        ("mpeg4", "mp4"),
        ("mjpeg", "mov"),
        ("prores", "mov"),
        ("vp9", "webm"),
        ("vp9", "mp4"),
        ("av1", "mp4"),
    ],
)
def test_containers_with_a_display_matrix(tmp_path: Path, codec: str, container: str) -> None:
    frames = moving(3, height=64, width=96)
    path = write_video(tmp_path / f"1.{container}", frames, codec, rotation=QUARTER)
    assert upright_by_ffmpeg(path).shape == (3, 96, 64, 3)
    assert orientation(path) == Orientation(transposed=True, rows=True)


@pytest.mark.parametrize(("codec", "container"), [("mjpeg", "avi"), ("h264", "ts"), ("vp9", "ivf"), ("vp8", "webm")])
def test_without_a_matrix_frames_are_upright(tmp_path: Path, codec: str, container: str) -> None:
    path = write_video(tmp_path / f"1.{container}", moving(24, height=64, width=96), codec)
    assert orientation(path) == Orientation()


@pytest.mark.parametrize(
    ("degrees", "nearest"), [(30, 0), (-44, 0), (46, 90), (89, 90), (134, 90), (136, 180), (-100, -90), (-170, 180)]
)
def test_other_angles_are_rounded(tmp_path: Path, degrees: int, nearest: int) -> None:
    path = write_video(tmp_path / "1.mp4", moving(2), "h264", rotation=(degrees, False, False))
    other = write_video(tmp_path / "2.mp4", moving(2), "h264", rotation=(nearest, False, False))
    assert orientation(path) == orientation(other)


def test_matrices_of_the_track_and_of_the_film(tmp_path: Path) -> None:
    path = write_video(tmp_path / "1.mp4", moving(2), "h264")
    quarter, mirror = [0, -1, 1, 0], [-1, 0, 0, 1]
    patched(path, b"mvhd", 40, quarter)
    np.testing.assert_array_equal(turned(decoded_by_pyav(path), orientation(path)), upright_by_ffmpeg(path))
    assert orientation(path) == Orientation(transposed=True, rows=True)
    patched(path, b"tkhd", 44, mirror)  # is done first
    np.testing.assert_array_equal(turned(decoded_by_pyav(path), orientation(path)), upright_by_ffmpeg(path))
    assert orientation(path) == Orientation(transposed=True)
    patched(path, b"mvhd", 40, [1, 0, 0, 1])
    patched(path, b"tkhd", 44, [0, 2, -2, 0])  # and twice as large
    assert orientation(path) == Orientation(transposed=True, columns=True)
    patched(path, b"tkhd", 44, [0, 0, 0, 0])
    assert orientation(path) == Orientation()


def test_shapes_are_told_as_stored_and_upright(tmp_path: Path) -> None:
    write_video(tmp_path / "a" / "1.mp4", moving(4), "h264", rotation=QUARTER)
    write_video(tmp_path / "a" / "2.mp4", moving(4), "h264", rotation=(180, False, False))
    write_video(tmp_path / "b" / "3.mp4", moving(4), "h264")
    clips = VideoClips.scan(str(tmp_path), sequence_length=2)
    assert clips.table.shapes.tolist() == [[48, 64]] * 3
    assert clips.upright_shapes.tolist() == [[64, 48], [48, 64], [48, 64]]
    assert clips.largest == {"h264": (48, 64)}
    assert clips.orientation(5) == Orientation() and clips.orientation(1).transposed
