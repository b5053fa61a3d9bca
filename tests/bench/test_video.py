"""`bench video` on the CPU: rows, files and refusals. How fast anything is, no test says."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline as DaliPipeline
from nvidia.dali import fn
from torch.nn.functional import interpolate

from raydali.bench import video
from raydali.bench.loader_rates import Delivered, Pixels
from raydali.bench.processes import MeasurementError
from raydali.bench.synthetic import VideoSet, write_videos
from raydali.bench.video import VideoBench, VideoTask, random_square, read_by_pyav, squares
from raydali.data.load.loader import Batch
from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.data.video.clips import VideoClips
from raydali.data.video.task import rgb_clip
from raydali.errors import CommandError, UsageError
from tests.support.messages import mentioning, mentions
from tests.support.videos import ROTATIONS, moving, write_video

OPTIONS = VideoBench(
    gpus="0", batch_size=2, sequence_length=4, image_size=32, threads=1, workers=1, seconds=0.3, repeats=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("videos"))
    write_videos(folder, VideoSet("mjpeg", videos=34, frames=9, height=72))
    return folder


def task_of(loader: str, root: str) -> VideoTask:
    options: dict[str, Any] = {"image_size": 32, "sequence_length": 4, "stride": 1, "threads": 1, "workers": 1}
    return VideoTask(loader=loader, root=root, batch_size=4, seconds=0.1, **options)


def test_made_videos_are_what_was_asked_for(folder: str, tmp_path: Path) -> None:
    clips = VideoClips.scan(folder, sequence_length=3)
    assert len(clips.videos) == 34 and set(clips.table.frames.tolist()) == {9}
    assert set(map(tuple, clips.table.shapes.tolist())) == {(72, 128)} and set(clips.table.codecs.tolist()) == {"mjpeg"}
    assert len({Path(clips.videos.path(id)).stat().st_ino for id in range(34)}) == 32
    for codec in ("h264", "vp9"):
        write_videos(str(tmp_path / codec), VideoSet(codec, videos=1, frames=33, height=72))
        made = VideoClips.scan(str(tmp_path / codec), sequence_length=3)
        assert made.table.codecs.tolist() == [codec] and made.table.key_frames.tolist() == [0, 30]


@pytest.mark.usefixtures("forked_ranks")
def test_rows_and_json(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "video.json"
    result = video.main(replace(OPTIONS, data=folder, decoders="2", pixels="uint8", json=str(json_file)))
    ours, pyav = result["rows"]
    assert [row["loader"] for row in result["rows"]] == ["raydali", "pyav"]
    for row in (ours, pyav):
        assert row["error"] is None and row["gpus"] == 0 and row["scaling"] is None and row["to_reader"] is None
        assert 0 < row["low"] <= row["frames_per_second"] <= row["high"]
    assert ours["decoders"] == 2
    assert ours["to_pyav"] == ours["frames_per_second"] / pyav["frames_per_second"]
    assert json.loads(json_file.read_text()) == result
    output = capsys.readouterr().out
    assert mentions(output, "68 clips 4 frames 34 videos") and "raydali, 2 decoders" in output


@pytest.mark.parametrize("loader", ["raydali", "pyav"])
def test_all_loaders_deliver_the_same(folder: str, loader: str) -> None:
    task = task_of(loader, folder)
    means = {}
    for pixels in get_args(Pixels)[::2]:
        torch.manual_seed(0)  # of the order in which DataLoaders take the clips
        with closing(replace(task, pixels=pixels).batches()) as batches:
            delivered = [clips_of(next(batches)) for _ in range(4)]
        assert {(clips.shape, str(clips.dtype)) for clips in delivered} == {((4, 3, 4, 32, 32), f"torch.{pixels}")}
        means[pixels] = torch.cat(delivered).double().mean((0, 2, 3, 4))
    expected = (means["uint8"] / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    assert torch.allclose(means["float32"], expected, atol=0.25), means  # the clips are not the same ones


def clips_of(batch: Any) -> torch.Tensor:
    """A batch's clips (N, 3, frames, H, W), whatever loader it is of."""
    clips: torch.Tensor = batch["clips"] if isinstance(batch, Batch) else batch[0]
    return clips.movedim(clips.shape.index(3), 1)


def test_pyav_sees_squares_of_upright_frames(tmp_path: Path) -> None:
    for i, rotation in enumerate(ROTATIONS):
        write_video(tmp_path / "a" / f"{i}.mov", moving(4, height=72, width=128), "mjpeg", rotation=rotation)
    clips = task_of("pyav", str(tmp_path)).clips()
    squares = [random_square(clips, id) for id in range(len(clips)) for _ in range(2)]
    assert len({*squares}) > len(clips) and {square.mirrored for square in squares} == {False, True}
    for i, square in enumerate(squares):
        seen = torch.from_numpy(read_by_pyav(clips, i // 2, square, 32)).movedim(-1, 1)
        whole = torch.from_numpy(rgb_clip(clips, i // 2)).movedim(-1, 1)
        part = whole[..., square.top : square.top + 72, square.left : square.left + 72]
        expected = interpolate(part, (32, 32), mode="bilinear", antialias=True)
        expected = expected.flip(-1) if square.mirrored else expected
        difference = (seen.double() - expected.double()).abs().mean()
        assert square.side == 72 and difference < 3, clips.path(i // 2)  # of 255


@pytest.mark.parametrize("pixels", ["uint8", "float32"])
def test_the_reader_s_graph_sees_a_square_of_the_frames(pixels: Any) -> None:
    """On the CPU, over frames whose pixels are the numbers of their columns."""
    frames = np.broadcast_to(np.arange(128, dtype=np.uint8)[:, None], (2, 72, 128, 3)).copy()
    pipeline = DaliPipeline(batch_size=16, num_threads=1, device_id=None, seed=1)
    with pipeline:
        clips: Any = fn.external_source(lambda: [frames] * 16, layout="FHWC")
        pipeline.set_outputs(squares(replace(task_of("reader", ""), pixels=pixels), clips))
    pipeline.build()
    (found,) = pipeline.run()
    found = found.as_array().astype(np.float64)
    assert found.shape == (16, 2, 32, 32, 3)
    if pixels == "float32":
        found = 255 * (found * IMAGENET_STD + IMAGENET_MEAN)
    left, right = found[:, 0, 0, 0, 0], found[:, 0, 0, -1, 0]
    assert np.allclose(np.abs(right - left), 72 * 31 / 32, atol=2.5) and len({*np.sign(right - left)}) == 2
    lowest = np.minimum(left, right)
    assert lowest.min() >= 0 and lowest.max() <= 58 and np.ptp(lowest) > 20


def test_ratios_and_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {("raydali", 1): 4000, ("raydali", 2): 8000, ("reader", 1): 1000, ("pyav", 1): 500}

    def deliver(task: Any, gpus: int) -> list[Any]:
        if (task.loader, gpus) not in rates:
            raise MeasurementError("it broke")
        return [Delivered(images=rates[task.loader, gpus], seconds=4.0)]

    monkeypatch.setattr("raydali.bench.common.gpu_names", lambda: ["GPU"] * 2)
    monkeypatch.setattr("raydali.bench.loader_rates.measure", deliver)
    with pytest.raises(CommandError, match=mentioning("reader 2 GPUs")):
        video.main(replace(OPTIONS, data=folder, gpus="1,2", pixels="uint8"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "GPU" in line]
    for line, figures in zip(
        lines, ("4,000 4.00 8.00 1.00", "8,000 16.00 2.00", "1,000 2.00", "failed: see below", "500"), strict=True
    ):
        assert mentions(line, figures), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 0}, "--frames 1 0"),
        ({"loaders": "decord"}, "--loaders decord raydali,reader,pyav"),
        ({"loaders": "reader"}, "--loaders"),
        ({"decoders": "1,x"}, "--decoders 1,4,7 1,x"),
        ({"decoders": "0"}, "--decoders 1"),
        ({"batch_size": 99}, "68 clips 99 CPU"),
    ],
)
def test_what_cannot_be_met_is_refused(
    monkeypatch: pytest.MonkeyPatch, folder: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("raydali.bench.loader_rates.measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(UsageError, match=mentioning(message)):
        video.main(replace(OPTIONS, data=folder, **options))
