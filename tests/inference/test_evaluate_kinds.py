"""`raydali evaluate` of multi-label lists, boxes, restored images and videos: figures, and the worst samples."""

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
from PIL import Image
from torchmetrics.functional.classification import multilabel_average_precision

from jobs import detection, imagenet, restoration, video
from raydali.commands import evaluate
from raydali.commands.evaluate import Evaluate
from raydali.data.sources.builtin.digits import digits_folder
from raydali.data.sources.builtin.shapes import shapes_folder
from raydali.data.sources.coco_folder import one_split
from raydali.inference.kinds.detection import Detection
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST
from tests.support.trained_runs import dealt_to, made_run
from tests.support.videos import ROTATIONS, decoded_by_pyav, moving, upright_by_ffmpeg, write_video


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
    """A detector with random weights that is sure of some boxes."""
    classes = one_split(shapes_folder(), "val").classes
    run = made_run(tmp_path_factory.mktemp("runs"), detection, detection.SHAPES, classes, first_label=1)
    state = safetensors.torch.load(run.read(BEST))
    state["head.classification_head.cls_logits.bias"] += 5
    run.write(BEST, safetensors.torch.save(state))
    return run


@pytest.mark.slow
def test_boxes(shapes_run: RunFolder) -> None:
    found = evaluated(shapes_run)
    assert found["samples"] == 60 and {"map", "map_50", "mar_100"} <= found["metrics"].keys()
    assert sum(row["boxes"] for row in found["classes"]) == len(one_split(shapes_folder(), "val").boxes)
    mistakes = [sum(map(int, each["predicted"].split()[::2])) for each in found["worst"]]
    assert mistakes == sorted(mistakes, reverse=True) and mistakes[-1] > 0
    assert all(each["loss"] is None for each in found["worst"])


def test_perfect_boxes_and_their_mistakes() -> None:
    """Of each annotation a box; then without the first, with one of another class, and with one that is there twice."""
    source = one_split(shapes_folder(), "val")
    arrays = {
        "ids": np.arange(len(source)),
        "counts": np.diff(source.first_boxes),
        "boxes": source.boxes,
        "scores": np.linspace(0.6, 0.9, len(source.boxes), dtype=np.float32),
        "labels": source.labels,
    }
    evaluation = Detection(detection.JOB, detection.SHAPES, detection.val_pipeline(detection.SHAPES)).evaluation
    perfect = evaluation(arrays, source, source.classes)
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
    worst = evaluation(arrays | again | {"counts": counts}, source, source.classes)["worst"]
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


# Restored images and videos


def test_restored_images(tmp_path: Path) -> None:
    """A network that returns its input, as an untrained one does."""
    found = evaluated(made_run(tmp_path, restoration, restoration.BLURRED, []), [2], batch_size=4)
    assert found["metrics"]["psnr"] == pytest.approx(found["metrics"]["input_psnr"])
    assert found["samples"] == 45 == len(found["worst"])
    psnr = [float(each["predicted"].split()[1]) for each in found["worst"]]
    assert psnr == sorted(psnr) and np.mean(psnr) == pytest.approx(found["metrics"]["psnr"], abs=0.06)


def test_rotated_videos_are_evaluated_as_upright_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path, video, video.DISCS, ["down", "left", "right", "up"])
    for i, rotation in enumerate(ROTATIONS):
        name = ("down", "left", "right", "up")[i % 4]
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
        ["down", "left", "right", "up"],
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
