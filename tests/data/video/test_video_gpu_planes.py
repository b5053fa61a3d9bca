"""What a GPU's clips go through behind its video engines, run on the CPU: from luma and chroma to RGB crops."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali as dali
import pytest
import torch
from nvidia.dali import fn

from raydali.data.video.clips import VideoClips
from raydali.data.video.gpu import Colours, Planes, colours_of, kept_regions, nv12, planes_graph, to_rgb
from raydali.data.video.task import Clips, TrainClips, ValidationClips, decoded
from tests.support.quick import first_quick
from tests.support.videos import ROTATIONS, UPRIGHT, Rotation, moving, write_video

SAME = {"mbtree": "0"}
"""With a macroblock tree, x264 writes other files each time, of which some are beyond the bound."""
VIDEOS = {
    "h264": ("h264", SAME),
    "h264-bt709": ("h264", SAME | {"x264-params": "colormatrix=bt709"}),
    "h264-full-range": ("h264", SAME | {"x264-params": "fullrange=on"}),
    "vp9": ("vp9", {}),
    "mjpeg": ("mjpeg", {}),
}
CONTAINERS = {"mjpeg": "avi", "vp9": "webm"}


@pytest.mark.parametrize(
    "pipeline", [ValidationClips(image_size=40, resize_size=48), TrainClips(image_size=40, resize_size=48, seed=3)]
)
@pytest.mark.parametrize("name", VIDEOS)
def test_planes_become_the_baseline_s_crops(tmp_path: Path, name: str, pipeline: Clips) -> None:
    codec, options = VIDEOS[name]
    path = tmp_path / "a" / f"1.{CONTAINERS.get(codec, 'mp4')}"
    write_video(path, moving(12, height=144, width=192), codec, options=options)
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    ids, epochs = np.arange(3), np.array([0, 1, 2])
    assert_baseline_s(pipeline, source, ids, epochs)


@first_quick("rotation", ROTATIONS)
def test_planes_of_rotated_videos(tmp_path: Path, rotation: Rotation) -> None:
    frames = moving(12, height=144, width=192)
    write_video(tmp_path / "a" / "1.mp4", frames, "h264", options=SAME, rotation=rotation)
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    for pipeline in (ValidationClips(image_size=40, resize_size=48), TrainClips(image_size=40, resize_size=48, seed=3)):
        assert_baseline_s(pipeline, source, np.arange(3), np.array([0, 1, 2]))


def assert_baseline_s(pipeline: Clips, source: VideoClips, ids: Any, epochs: Any) -> None:
    ours = by_planes(pipeline, source, ids, epochs)
    for clip, id, epoch in zip(ours, ids.tolist(), epochs.tolist(), strict=True):
        theirs = pipeline.sample(source, id, epoch)[0].permute(1, 2, 3, 0).numpy().astype(int)
        apart = np.abs(clip.astype(int) - theirs)
        print(apart.max(), apart.mean())
        assert apart.max() <= 4 and apart.mean() < 1, (apart.max(), apart.mean())


def by_planes(pipeline: Clips, source: VideoClips, ids: Any, epochs: Any) -> Any:
    crops = pipeline.crops(source, ids, epochs)
    regions = kept_regions(source, ids, crops, pipeline.image_size)
    planes_of: tuple[list[Any], list[Any]] = [], []
    matrices, offsets = [], []
    for id, part in zip(ids.tolist(), regions.parts, strict=True):
        with source.cut(id) as cut:
            colours = colours_of(cut)
            assert colours.pixels in ("yuv420p", "yuvj420p")
            planes = Planes(source.sequence_length, int(source.table.shapes[0, 0]), part, torch.device("cpu"))
            for place, frame in enumerate(decoded(cut, partial(nv12, colours=colours))):
                planes.put(place, frame)
        for all_of_them, found in zip(planes_of, planes.parts(source.orientation(id)), strict=True):
            all_of_them.append(found.numpy())
        matrix, offset = to_rgb(colours)
        matrices.append(matrix)
        offsets.append(offset)
    inputs = *planes_of, regions.starts, regions.ends, np.stack(matrices), np.stack(offsets), crops.flips
    graph = dali.Pipeline(batch_size=len(ids), num_threads=1, device_id=None)
    with graph:
        nodes = fn.external_source(lambda: (*inputs, source.labels(ids)), num_outputs=len(inputs) + 1)
        graph.set_outputs(*planes_graph(pipeline.image_size, *nodes, device="cpu"))
    graph.build()
    clips, labels = graph.run()
    assert clips.layout() == "FHWC"
    np.testing.assert_array_equal(labels.as_array(), source.labels(ids))
    return clips.as_array()


@pytest.mark.parametrize(
    ("space", "red"), [(1, (255 / 219, 0, 1.7927)), (5, (255 / 219, 0, 1.5960)), (2, (255 / 219, 0, 1.5960))]
)
def test_matrices_are_the_standards(space: int, red: tuple[float, float, float]) -> None:
    matrix, offset = to_rgb(Colours("yuv420p", space, 1))
    np.testing.assert_allclose(matrix[0], red, atol=2e-4)
    for grey, coded in ((0, 16), (255, 235)):
        np.testing.assert_allclose(matrix @ np.array([coded, 128, 128], np.float32) + offset, [grey] * 3, atol=1e-3)


@pytest.mark.parametrize("rotation", [UPRIGHT, *ROTATIONS])
def test_parts_hold_the_crop_and_what_antialiasing_sees(tmp_path: Path, rotation: Rotation) -> None:
    write_video(tmp_path / "a" / "1.mov", moving(4, height=150, width=250), "mjpeg", rotation=rotation)
    source = VideoClips.scan(str(tmp_path), sequence_length=4)
    for seed in range(40):
        pipeline = TrainClips(image_size=32, resize_size=36, seed=seed)
        crops = pipeline.crops(source, np.array([0]), np.array([0]))
        regions = kept_regions(source, np.array([0]), crops, pipeline.image_size)
        transposed, *flipped = source.orientation(0)
        parts = regions.parts[0][::-1] if transposed else regions.parts[0]
        for side, (part, start, end) in enumerate(zip(parts, regions.starts[0], regions.ends[0], strict=True)):
            size = source.upright_shapes[0, side]
            scale = size / crops.resized[0, side]
            assert part.start % 2 == part.stop % 2 == 0 and 0 <= part.start < part.stop <= size
            first, last = (size - part.stop, size - part.start) if flipped[side] else (part.start, part.stop)
            np.testing.assert_allclose(first + start, crops.starts[0, side] * scale, atol=1e-3)
            assert start >= scale or first == 0
            assert last - first - end >= scale or last == size
