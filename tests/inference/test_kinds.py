"""Predictions of every kind of job, and of every kind of source."""

import csv
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from PIL import Image, ImageOps

from jobs import detection, imagenet, restoration, video
from raydali.commands import predict
from raydali.commands.predict import Predict
from raydali.data.sources.builtin.digits import digits_folder
from raydali.data.sources.builtin.moving_discs import moving_discs_folder
from raydali.data.sources.builtin.shapes import shapes_folder
from raydali.errors import UsageError
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST
from tests.support.messages import mentioning
from tests.support.parquets import write_parquet
from tests.support.pictures import encoded, photograph
from tests.support.tars import packed
from tests.support.tfrecords import example, record
from tests.support.trained_runs import made_run

CLASSES = [*map(str, range(10))]
TURNED = 6
"""The EXIF orientation of an image whose pixels lie on their side."""


def predicted(run: RunFolder, data: Path | str, output: Path, **given: Any) -> Path:
    predict.main(Predict(run=str(run), data=str(data), output=str(output), **given))
    return output


def rows(output: Path) -> list[dict[str, str]]:
    with output.open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return made_run(tmp_path_factory.mktemp("runs"), imagenet, imagenet.DIGITS, CLASSES)


# Images in shards, of which none has a label


SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder of tar", "tfrecord", "folder of parquet")]


@pytest.mark.parametrize("kind", ["tar", "parquet", *SLOWER])
def test_shards_without_labels(
    digits_run: RunFolder, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = sorted(Path(digits_folder(), "val").glob("*/*"))[::9]
    images, half = [file.read_bytes() for file in files], len(files) // 2
    data, folder = str(tmp_path / "shards"), tmp_path / "shards"
    folder.mkdir()
    for number, part in enumerate((images[:half], images[half:])):
        if "tar" in kind:
            members = {f"{id:04}.jpg": image for id, image in enumerate(part)}
            (folder / f"x-{number}.tar").write_bytes(packed(members))
        elif "parquet" in kind:
            write_parquet(folder / f"x-{number}.parquet", part, [0.5] * len(part), columns=("image", "weight"), rows=7)
        else:
            records = (record(example({"image/encoded": image})) for image in part)
            (folder / f"x-{number:05}-of-00002").write_bytes(b"".join(records))
    if "folder" not in kind:
        data += {"tar": "/x-{0..1}.tar", "parquet": "/x-*.parquet", "tfrecord": "/x-*-of-00002"}[kind]
    of_shards = rows(predicted(digits_run, data, tmp_path / "shards.csv", batch_size=8))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{file}\n" for file in files))
    of_files = rows(predicted(digits_run, listed, tmp_path / "files.csv", batch_size=8))
    assert [{**row, "path": ""} for row in of_shards] == [{**row, "path": ""} for row in of_files]
    assert len({row["path"] for row in of_shards}) == len(files)


# Boxes


@pytest.fixture(scope="module")
def shapes_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A detector that finds many boxes, whose categories have the ids 7, 5 and 90."""
    run = made_run(tmp_path_factory.mktemp("runs"), detection, detection.SHAPES, ["b", "a", "c"], first_label=1)
    _shift_scores(run, 5)
    run.write_json("model.json", run.read_json("model.json") | {"category_ids": [7, 5, 90]})
    return run


def _shift_scores(run: RunFolder, by: float) -> None:
    state = safetensors.torch.load(run.read(BEST))
    state["head.classification_head.cls_logits.bias"] += by
    run.write(BEST, safetensors.torch.save(state))


def test_boxes_are_written_as_coco_has_them(shapes_run: RunFolder, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    shape = min(Path(shapes_folder(), "val").glob("*"))
    (folder / "a.png").write_bytes(shape.read_bytes())
    photograph(size=(90, 60)).save(folder / "b.jpg")
    exif = Image.Exif()
    exif[0x0112] = TURNED
    photograph(size=(90, 60)).save(folder / "c.jpg", exif=exif)
    (folder / "d.jpg").write_bytes(b"no image")
    table = rows(predicted(shapes_run, folder, tmp_path / "boxes.csv"))
    results = json.loads(predicted(shapes_run, folder, tmp_path / "boxes.json").read_text())
    assert len(results) == len(table) > 10
    ids = {"b": 7, "a": 5, "c": 90}
    for row, result in zip(table, results, strict=True):
        assert result["file_name"] == row["path"] and result["image_id"] == int(row["image"])
        assert result["category_id"] == ids[row["label"]] and result["score"] == pytest.approx(float(row["score"]))
        corner = [float(row[name]) for name in ("x", "y", "width", "height")]
        assert result["bbox"] == pytest.approx(corner, abs=0.006)
        with Image.open(row["path"]) as image:
            width, height = ImageOps.exif_transpose(image).size
        x, y, wide, high = corner
        assert min(x, y, wide, high) >= -1e-3 and x + wide <= width + 1e-3 and y + high <= height + 1e-3
    assert {Path(row["path"]).name for row in table} == {"a.png", "b.jpg", "c.jpg"}
    assert [Path(row["path"]).name for row in rows(tmp_path / "boxes.json.broken.csv")] == ["d.jpg"]


def test_an_image_without_boxes_has_no_row(tmp_path: Path) -> None:
    run = made_run(tmp_path, detection, detection.SHAPES, ["a"], first_label=1)
    _shift_scores(run, -20)
    output = predicted(run, Path(shapes_folder(), "val"), tmp_path / "boxes.csv")
    assert rows(output) == [] and output.read_text().startswith('"path"')


# Restored images


@pytest.fixture(scope="module")
def restoration_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A network that returns its input, as an untrained one does."""
    return made_run(tmp_path_factory.mktemp("runs"), restoration, restoration.BLURRED, [])


def test_whole_images_of_any_size_are_restored(restoration_run: RunFolder, tmp_path: Path) -> None:
    sizes = {"a/1.png": (61, 40), "a/2.png": (8, 9), "b.png": (300, 200)}
    for name, size in sizes.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        photograph(size=size).save(tmp_path / "in" / name)
    (tmp_path / "in/b.jpg").write_bytes(encoded(photograph(size=(31, 17)), quality=90))
    (tmp_path / "in/broken.jpg").write_bytes(b"")
    (tmp_path / "in/b.png").rename(tmp_path / "in/c.png")
    output = predicted(restoration_run, tmp_path / "in", tmp_path / "out")
    assert {str(path.relative_to(output)) for path in output.rglob("*.png")} == {"a/1.png", "a/2.png", "b.png", "c.png"}
    for path in output.rglob("*.png"):
        source = next((tmp_path / "in").glob(f"{path.relative_to(output).with_suffix('')}.*"))
        with Image.open(path) as ours, Image.open(BytesIO(source.read_bytes())) as before:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(before.convert("RGB")))
    assert [Path(row["path"]).name for row in rows(tmp_path / "out.broken.csv")] == ["broken.jpg"]
    with pytest.raises(UsageError, match=mentioning(str(output))):
        predicted(restoration_run, tmp_path / "in", tmp_path / "out")


# Videos


def test_a_video_has_a_row(tmp_path: Path) -> None:
    run = made_run(tmp_path, video, video.DISCS, ["a", "b", "c", "d"])
    folder = Path(moving_discs_folder(), "val")
    files = sorted(folder.glob("*/*"))
    found = rows(predicted(run, folder, tmp_path / "videos.csv", batch_size=3))
    assert [row["path"] for row in found] == [*map(str, files)]
    for row in found:
        assert int(row["clips"]) >= 1 and row["label"] in {"a", "b", "c", "d"}
        probabilities = [float(row[f"probability{ending}"]) for ending in ("", "_2", "_3", "_4")]
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
