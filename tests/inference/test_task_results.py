"""Evaluations and predictions of every kind of job: figures, the worst samples, rows, and sources without labels."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image, ImageOps
from torchmetrics.functional.classification import multilabel_average_precision

from jobs import detection, imagenet, restoration, video
from raydali.commands import evaluate, predict
from raydali.commands.evaluate import Evaluate
from raydali.commands.predict import Predict
from raydali.data.builtin.digits import digits_folder
from raydali.data.builtin.moving_discs import moving_discs_folder
from raydali.data.builtin.shapes import shapes_folder
from raydali.data.index.coco_folder import one_split
from raydali.errors import CommandError, UsageError
from raydali.inference.task_results.detection import Detection
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST
from tests.support.copied_jobs import changed_copy
from tests.support.messages import mentioning
from tests.support.parquets import write_parquet
from tests.support.pictures import encoded, photograph
from tests.support.tars import packed
from tests.support.tfrecords import example, record
from tests.support.trained_runs import dealt_to, made_run
from tests.support.videos import ROTATIONS, decoded_by_pyav, moving, upright_by_ffmpeg, write_video

TURNED = 6
"""The EXIF orientation of an image whose pixels lie on their side."""
DIRECTIONS = ["down", "left", "right", "up"]


def evaluated(run: RunFolder, numbers: Sequence[int] = (1, 3), **given: Any) -> dict[str, Any]:
    """What evaluation.json has, without the times; the same on these numbers of workers."""
    found = []
    for workers in numbers:
        with dealt_to(workers):
            evaluate.main(Evaluate(run=str(run), **given))
        found.append(run.read_json("evaluation.json"))
        assert found[-1].pop("time") > 1e9 and found[-1].pop("samples_per_second") > 0
    assert all(other == found[0] for other in found)
    result: dict[str, Any] = found[0]
    if result["worst"]:
        with Image.open(io.BytesIO(run.read("worst.png"))) as sheet:
            assert sheet.width > 1000 and sheet.height > 100 * (len(result["worst"]) // 8)
    return result


def predicted(run: RunFolder, data: Path | str, output: Path, **given: Any) -> Path:
    predict.main(Predict(run=str(run), data=str(data), output=str(output), **given))
    return output


def rows(output: Path) -> list[dict[str, str]]:
    with output.open(newline="") as file:
        return [*csv.DictReader(file)]


# Images in shards, of which none has a label


SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder of tar", "tfrecord", "folder of parquet")]


@pytest.mark.parametrize("kind", ["tar", "parquet", *SLOWER])
def test_shards_without_labels(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digits_run = made_run(tmp_path, imagenet, imagenet.DIGITS, [*map(str, range(10))])
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


# Several labels


@pytest.mark.slow
def test_several_labels(tmp_path: Path) -> None:
    files = sorted(Path(digits_folder(), "val").glob("*/*"))[::7]
    truth = [[int(file.parent.name) % 2, int(int(file.parent.name) > 6), 0] for file in files]
    for name in ("train", "val"):
        lines = [",".join(map(str, [file, *labels])) for file, labels in zip(files, truth, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,odd,large,none", *lines]) + "\n")
    lists = [str(tmp_path / f"{name}.csv") for name in ("train", "val")]
    config = replace(imagenet.DIGITS, data=lists[0], val_data=lists[1], multi_label=True)
    run = made_run(tmp_path, imagenet, config, ["odd", "large", "none"])
    found = evaluated(run)
    assert evaluated(run, [1], data=lists[1])["metrics"] == found["metrics"]

    opened = open_run(str(run))
    source = opened.data.val
    pixels = torch.stack([opened.pipeline.sample(source, id, 0)[0] for id in range(len(source))])
    with torch.inference_mode():
        logits = opened.network(3)(pixels)
    average = multilabel_average_precision(logits[:, :2], torch.tensor(truth)[:, :2], 2, average=None).tolist()
    assert [row["average_precision"] for row in found["classes"]] == [*map(pytest.approx, average), None]
    assert found["metrics"]["map"] == pytest.approx(np.mean(average))
    said = (logits > 0).int() == torch.tensor(truth)
    assert found["metrics"]["accuracy"] == pytest.approx(said.float().mean().item(), abs=1e-6)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(truth).float(), reduction="none")
    assert [each["loss"] for each in found["worst"]] == pytest.approx(
        losses.mean(1).sort(descending=True).values[:64].tolist(), abs=1e-4
    )


# Boxes


@pytest.fixture(scope="module")
def shapes_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A detector with random weights that finds many boxes, whose categories have the ids 7, 5 and 90."""
    classes = one_split(shapes_folder(), "val").classes
    run = made_run(tmp_path_factory.mktemp("runs"), detection, detection.SHAPES, classes, first_label=1)
    _shift_scores(run, 5)
    run.write_json("model.json", run.read_json("model.json") | {"category_ids": [7, 5, 90]})
    return run


def _shift_scores(run: RunFolder, by: float) -> None:
    state = safetensors.torch.load(run.read(BEST))
    state["head.classification_head.cls_logits.bias"] += by
    run.write(BEST, safetensors.torch.save(state))


@pytest.mark.slow
def test_boxes(shapes_run: RunFolder) -> None:
    found = evaluated(shapes_run)
    assert found["samples"] == 60 and {"map", "map_50", "mar_100"} <= found["metrics"].keys()
    assert sum(row["boxes"] for row in found["classes"]) == len(one_split(shapes_folder(), "val").boxes)
    mistakes = [sum(map(int, each["predicted"].split()[::2])) for each in found["worst"]]
    assert mistakes == sorted(mistakes, reverse=True) and mistakes[-1] > 0
    assert all(each["loss"] is None for each in found["worst"])


def test_perfect_boxes_and_their_mistakes(shapes_run: RunFolder) -> None:
    """Of each annotation a box; then without the first, with one of another class, and with one that is there twice."""
    source = one_split(shapes_folder(), "val")
    arrays = {
        "ids": np.arange(len(source)),
        "counts": np.diff(source.first_boxes),
        "boxes": source.boxes,
        "scores": np.linspace(0.6, 0.9, len(source.boxes), dtype=np.float32),
        "labels": source.labels,
    }
    evaluation = Detection(open_run(str(shapes_run)), source, source.classes).evaluation
    perfect = evaluation(arrays)
    assert perfect["metrics"]["map"] == pytest.approx(1) and not perfect["worst"]
    assert [row["map"] for row in perfect["classes"]] == [pytest.approx(1)] * 3

    labels, scores = source.labels.copy(), arrays["scores"].copy()
    of_image = [source.boxes_of(id) for id in range(4)]
    scores[of_image[1].start] = 0.4
    labels[of_image[2].start] = labels[of_image[2].start] % 3 + 1
    again = {name: np.insert(array, of_image[3].start, array[of_image[3].start], 0) for name, array in
             (("boxes", source.boxes), ("scores", scores), ("labels", labels))}  # fmt: skip
    counts = arrays["counts"].copy()
    counts[3] += 1
    worst = evaluation(arrays | again | {"counts": counts})["worst"]
    assert {(each["id"], each["predicted"]) for each in worst} == {
        (1, "1 missed, 0 false"),
        (2, "1 missed, 1 false"),
        (3, "0 missed, 1 false"),
    }
    assert worst[0]["id"] == 2


@pytest.mark.slow
def test_classes_of_boxes_are_found_by_name(shapes_run: RunFolder, tmp_path: Path) -> None:
    """Annotations with two of three classes, whose ids are in another order."""
    root = Path(shapes_folder())
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val").symlink_to(root / "val")
    (file,) = (root / "annotations").glob("*val*")
    annotations = json.loads(file.read_text())
    names = {each["id"]: each["name"] for each in annotations["categories"]}
    dropped = min(names)
    ids = {id: 100 - id for id in names if id != dropped}
    kept = [each | {"category_id": ids[each["category_id"]]} for each in annotations["annotations"]
            if each["category_id"] != dropped]  # fmt: skip
    categories = [{"id": new, "name": names[old]} for old, new in ids.items()]
    content = json.dumps(annotations | {"annotations": kept, "categories": categories})
    (tmp_path / "annotations" / file.name).write_text(content)
    every, some = evaluated(shapes_run, [1]), evaluated(shapes_run, [1], data=str(tmp_path))
    for before, after in zip(every["classes"], some["classes"], strict=True):
        assert after["class"] == before["class"]
        if after["class"] == names[dropped]:
            assert after["boxes"] == 0
        else:
            assert after["boxes"] == before["boxes"] and after["map"] == pytest.approx(before["map"])


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
    for name in ("boxes.csv", "boxes.json"):
        with pytest.raises(CommandError, match=mentioning(f"1 image {tmp_path}/{name}.broken.csv")):
            predicted(shapes_run, folder, tmp_path / name)
    table, results = rows(tmp_path / "boxes.csv"), json.loads((tmp_path / "boxes.json").read_text())
    assert len(results) == len(table) > 10
    ids = dict(zip(one_split(shapes_folder(), "val").classes, (7, 5, 90), strict=True))
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


def test_restored_images(restoration_run: RunFolder) -> None:
    found = evaluated(restoration_run, [2], batch_size=4)
    assert found["metrics"]["psnr"] == pytest.approx(found["metrics"]["input_psnr"])
    assert found["samples"] == 45 == len(found["worst"])
    psnr = [float(each["predicted"].split()[1]) for each in found["worst"]]
    assert psnr == sorted(psnr) and np.mean(psnr) == pytest.approx(found["metrics"]["psnr"], abs=0.06)


def test_whole_images_of_any_size_are_restored(restoration_run: RunFolder, tmp_path: Path) -> None:
    sizes = {"a/1.png": (61, 40), "a/2.png": (8, 9), "b.png": (300, 200)}
    for name, size in sizes.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        photograph(size=size).save(tmp_path / "in" / name)
    (tmp_path / "in/b.jpg").write_bytes(encoded(photograph(size=(31, 17)), quality=90))
    (tmp_path / "in/broken.jpg").write_bytes(b"")
    (tmp_path / "in/b.png").rename(tmp_path / "in/c.png")
    output = tmp_path / "out"
    with pytest.raises(CommandError, match=mentioning("1 sample broken.jpg")):
        predicted(restoration_run, tmp_path / "in", output)
    assert {str(path.relative_to(output)) for path in output.rglob("*.png")} == {"a/1.png", "a/2.png", "b.png", "c.png"}
    for path in output.rglob("*.png"):
        source = next((tmp_path / "in").glob(f"{path.relative_to(output).with_suffix('')}.*"))
        with Image.open(path) as ours, Image.open(io.BytesIO(source.read_bytes())) as before:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(before.convert("RGB")))
    assert [Path(row["path"]).name for row in rows(tmp_path / "out.broken.csv")] == ["broken.jpg"]
    with pytest.raises(UsageError, match=mentioning(str(output))):
        predicted(restoration_run, tmp_path / "in", tmp_path / "out")
    older = changed_copy("restoration", {"    predictions=predictions,\n": ""}, tmp_path)
    (tmp_path / "in/broken.jpg").unlink()
    again = predicted(restoration_run, tmp_path / "in", tmp_path / "again", job=str(older))
    for path in output.rglob("*.png"):
        assert (again / path.relative_to(output)).read_bytes() == path.read_bytes()


# Videos


@pytest.mark.slow
def test_rotated_videos_are_evaluated_as_upright_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path, video, video.DISCS, DIRECTIONS)
    for i, rotation in enumerate(ROTATIONS):
        name = DIRECTIONS[i % 4]
        path = tmp_path / "rotated" / name / f"{i}.mp4"
        write_video(path, moving(20, start=9 * i), "h264rgb", rotation=rotation)  # in RGB, as the upright ones
        write_video(tmp_path / "upright" / name / f"{i}.mkv", upright_by_ffmpeg(path), "ffv1")
        write_video(tmp_path / "stored" / name / f"{i}.mkv", decoded_by_pyav(path), "ffv1")
    rotated, upright, stored = (
        evaluated(run, [1], data=str(tmp_path / kind))["metrics"]["video_loss"]
        for kind in ("rotated", "upright", "stored")
    )
    assert rotated == pytest.approx(upright, abs=2e-5) and rotated != pytest.approx(stored, abs=2e-4)


def test_videos(tmp_path: Path) -> None:
    """Clips are averaged by video."""
    run = made_run(
        tmp_path,
        video,
        replace(video.DISCS, sequence_length=video.DISCS.sequence_length // 2),
        DIRECTIONS,
    )
    found = evaluated(run, [2], batch_size=3)
    opened = open_run(str(run))
    source = opened.data.val
    assert found["samples"] == len(source) > 80 == sum(row["videos"] for row in found["classes"])
    videos = source.places(np.arange(len(source)))[0]
    network, mean = opened.network(4), np.zeros((80, 4))
    with torch.inference_mode():
        for id in range(len(source)):
            clip = opened.pipeline.sample(source, id, 0)[0][None]
            mean[videos[id]] += network(clip).softmax(1)[0].numpy() / (videos == videos[id]).sum()
    assert found["metrics"]["video_top1"] == pytest.approx((mean.argmax(1) == source.videos.labels).mean(), abs=0.03)
    losses = -np.log(mean[np.arange(80), source.videos.labels])
    assert found["metrics"]["video_loss"] == pytest.approx(losses.mean(), abs=0.01)
    assert len(found["worst"]) == 64 and found["worst"][0]["path"].endswith(".avi")


def test_a_video_has_a_row(tmp_path: Path) -> None:
    run = made_run(tmp_path, video, video.DISCS, DIRECTIONS)
    folder = Path(moving_discs_folder(), "val")
    files = sorted(folder.glob("*/*"))
    found = rows(predicted(run, folder, tmp_path / "videos.csv", batch_size=3))
    assert [row["path"] for row in found] == [*map(str, files)]
    for row in found:
        assert int(row["clips"]) >= 1 and row["label"] in DIRECTIONS
        probabilities = [float(row[f"probability{ending}"]) for ending in ("", "_2", "_3", "_4")]
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
