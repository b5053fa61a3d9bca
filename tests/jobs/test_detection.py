"""jobs/detection.py on plain gloo processes: the same on any number of workers, the demo learns, and mAP is COCO's."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from jobs.detection import SHAPES, Config, Data, open_data, train
from raydali.commands import predict
from raydali.commands.predict import Predict
from raydali.data.index.coco import Coco
from raydali.errors import UsageError
from raydali.training.evaluation.detection import Found, coco_metrics
from raydali.training.forward_backward import Precision
from raydali.training.models.detection import build_detector, check_detector
from tests.support.cluster import finished_run
from tests.support.job_ranks import train_rank, train_rank_in_double
from tests.support.messages import mentioning
from tests.support.ranks import Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole
from tests.support.yolo import shapes_in_yolo

# Three micro-batches a global batch: 2 workers share them unevenly. Two steps close the run's one epoch.
CONFIG = replace(
    SHAPES,
    ceiling=False,
    epochs=1,
    image_size=64,
    batch_size=4,
    global_batch_size=12,
    trace_samples=True,
    checkpoint_every=1,
)


@pytest.fixture(scope="module")
def shapes() -> Data:
    return open_data(SHAPES)


def first(source: Coco, count: int) -> Coco:
    """The source's first images."""
    boxes = int(source.first_boxes[count])
    return replace(
        source,
        packed_paths=source.packed_paths[: source.offsets[count] - 1],
        offsets=source.offsets[: count + 1],
        sizes=source.sizes[:count],
        image_ids=source.image_ids[:count],
        first_boxes=source.first_boxes[: count + 1],
        boxes=source.boxes[:boxes],
        labels=source.labels[:boxes],
        crowd=source.crowd[:boxes],
    )


in_single = partial(train_rank, train)
in_double = partial(train_rank_in_double, train)


def test_one_and_two_workers_and_a_resume_train_the_same(tmp_path: Path, shapes: Data) -> None:
    data = Data(first(shapes.train, 36), first(shapes.val, 10))
    runs = {name: folder_of(tmp_path, name) for name in ("alone", "cut")}
    weights = run_ranks(1, in_double, CONFIG, data, runs["alone"])[0]
    with pytest.raises(Stopped):
        run_ranks(2, in_double, CONFIG, data, runs["cut"], 2)  # checkpoint at 1; the second runs again
    others = run_ranks(2, in_double, CONFIG, data, runs["cut"])[0]

    for folder in runs.values():
        assert_whole(folder, CONFIG.stream(36))
    (row,), (other,) = (folder.rows("epochs.jsonl") for folder in runs.values())
    assert row["loss"] == pytest.approx(other["loss"], rel=1e-6)
    for name in ("images", "map", "map_50"):
        assert row["validation"][name] == pytest.approx(other["validation"][name], abs=1e-6)
    assert row["validation"]["images"] == 10
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor, others[name], rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.slow
def test_a_run_on_yolo_predicts_its_numbers_of_classes(tmp_path: Path) -> None:
    data, output = shapes_in_yolo(tmp_path / "data"), tmp_path / "boxes.json"
    options = ["--model", "tiny", "--image-size", "64", "--epochs", "1", "--batch-size", "30", "--no-ceiling"]
    finished_run(tmp_path, "run", "--data", str(data), *options, script="jobs/detection.py")
    predict.main(Predict(run=str(tmp_path / "run"), data=str(data / "images/val"), output=str(output)))
    assert {result["category_id"] for result in json.loads(output.read_text())} == {10, 20, 30}


@pytest.mark.slow
def test_the_demo_learns_shapes(tmp_path: Path, shapes: Data) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, in_single, replace(SHAPES, ceiling=False, global_batch_size=16, epochs=4), shapes, folder)
    last = folder.rows("epochs.jsonl")[-1]
    assert last["validation"]["images"] == 60
    assert last["validation"]["map_50"] > 0.2


# What is measured

FIGURES = (
    *("map", "map_50", "map_75", "map_small", "map_medium", "map_large"),
    *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
)
"""In the order of pycocotools."""


def found_near(source: Coco, random: np.random.Generator) -> list[Found]:
    """Boxes near the true ones, some under a wrong label, and some out of the blue, in every image."""
    found = []
    for id in range(len(source)):
        of_image = source.boxes_of(id)
        blue = random.uniform(0, 60, (3, 2))
        boxes = np.concatenate(
            [
                source.boxes[of_image] + random.normal(0, 4, (of_image.stop - of_image.start, 4)),
                np.hstack([blue, blue + 30]),
            ]
        ).astype(np.float32)
        labels = np.concatenate([source.labels[of_image], [1, 2, 3]])
        labels = np.where(random.random(len(labels)) < 0.2, 1 + labels % 3, labels)
        found.append((id, boxes, random.random(len(labels)).astype(np.float32), labels))
    return found


def of_pycocotools(found: Sequence[Found], source: Coco) -> tuple[list[float], list[float]]:
    """COCO's twelve figures, and the mAP of each class."""

    def indexed(boxes: np.ndarray, owners: np.ndarray, labels: np.ndarray, **more: list[Any]) -> COCO:
        corners, sides = boxes[:, :2].tolist(), (boxes[:, 2:] - boxes[:, :2]).tolist()
        annotations = [
            {"id": i + 1, "image_id": owner, "category_id": label, "bbox": [*corner, *side], "area": side[0] * side[1]}
            | {name: values[i] for name, values in more.items()}
            for i, (owner, label, corner, side) in enumerate(
                zip(owners.tolist(), labels.tolist(), corners, sides, strict=True)
            )
        ]
        coco = COCO()
        coco.dataset = {
            "images": [{"id": id} for id in range(len(source))],
            "annotations": annotations,
            "categories": [{"id": i + 1} for i in range(len(source.classes))],
        }
        coco.createIndex()
        return coco

    ids, boxes, scores, labels = zip(*found, strict=True)
    owners = np.repeat(np.arange(len(source)), np.diff(source.first_boxes))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = indexed(source.boxes, owners, source.labels, iscrowd=source.crowd.astype(int).tolist())
        owners = np.repeat(ids, [len(of_image) for of_image in boxes])
        more = {"score": np.concatenate(scores).tolist(), "iscrowd": [0] * len(owners)}
        results = indexed(np.concatenate(boxes), owners, np.concatenate(labels), **more)
        evaluation = COCOeval(truth, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    of_classes = [each[each > -1] for each in np.moveaxis(evaluation.eval["precision"][:, :, :, 0, -1], 2, 0)]
    return evaluation.stats.tolist(), [each.mean() if len(each) else -1 for each in of_classes]


def ours(found: Sequence[Found], source: Coco) -> tuple[list[float], list[float]]:
    result = coco_metrics(found, source, of_classes=True)
    of_labels = dict(zip(result["classes"].tolist(), result["map_per_class"].tolist(), strict=True))
    return [float(result[name]) for name in FIGURES], [of_labels.get(i + 1, -1) for i in range(len(source.classes))]


def drawn(random: np.random.Generator, images: int, most: int, classes: int) -> tuple[Coco, list[Found]]:
    """Boxes of all sizes, crowds, images without boxes or detections, equal scores, one image with over 100."""
    counts = random.integers(0, most + 1, images) * (random.random(images) < 0.8)
    sides = np.exp(random.uniform(np.log(4), np.log(300), (counts.sum(), 2)))
    corners = random.uniform(0, 400, (counts.sum(), 2))
    source = Coco(
        *("/", np.zeros(0, np.uint8), np.arange(images + 1)),
        sizes=np.zeros((images, 2), np.int64),
        image_ids=np.arange(images),
        first_boxes=np.concatenate([[0], np.cumsum(counts)]),
        boxes=np.hstack([corners, corners + sides]).astype(np.float32),
        labels=random.integers(1, classes, counts.sum()),  # the last class has none
        crowd=random.random(counts.sum()) < 0.1,
        classes=tuple(map(str, range(classes))),
        category_ids=np.arange(classes),
    )
    found = []
    for id, (_, boxes, scores, labels) in enumerate(found_near(source, random)):
        times = 40 if id == 0 else int(random.random() < 0.8)
        shifts = random.normal(0, 3, (len(boxes) * times, 4)).astype(np.float32)
        again = np.tile(boxes, (times, 1)) + shifts
        found.append((id, again, np.tile(scores.round(1), times), np.tile(labels, times)))
    return source, found


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_pycocotools(seed: int) -> None:
    random = np.random.default_rng(seed)
    source, found = drawn(random, images=40 * seed + 30, most=12, classes=4 + seed)
    expected, of_classes = of_pycocotools(found, source)
    figures, ours_of_classes = ours(found, source)
    assert figures == pytest.approx(expected, abs=1e-6) and ours_of_classes == pytest.approx(of_classes, abs=1e-6)
    assert 0.01 < figures[0] < figures[1] < 0.9 and of_classes[-1] == -1
    assert max(len(labels) for *_, labels in found) > 100 and source.crowd.any()
    without = replace(source, crowd=np.zeros_like(source.crowd))
    assert ours(found, without)[0] != pytest.approx(figures, abs=1e-3)  # crowds count


def test_figures_without_any_detection_or_box() -> None:
    source, found = drawn(np.random.default_rng(0), images=8, most=3, classes=3)
    nothing: list[Found] = [(id, boxes[:0], scores[:0], labels[:0]) for id, boxes, scores, labels in found]
    assert ours(nothing, source)[0] == pytest.approx(of_pycocotools(nothing, source)[0], abs=1e-6)
    empty = replace(source, first_boxes=0 * source.first_boxes, boxes=source.boxes[:0], labels=source.labels[:0])
    empty = replace(empty, crowd=source.crowd[:0])
    for detections in (found, nothing):
        assert ours(detections, empty)[0] == of_pycocotools(detections, empty)[0] == [-1] * 12


# Models


def test_models_by_name() -> None:
    for name in ("tiny", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "fasterrcnn_resnet50_fpn"):
        check_detector(name)
    with pytest.raises(UsageError, match=mentioning("--model retinanet_resnet50_fpn")):
        check_detector("retinanet")
    with pytest.raises(UsageError, match=r"--model maskrcnn_resnet50_fpn is not"):
        check_detector("maskrcnn_resnet50_fpn")


@pytest.mark.parametrize("name", ["tiny", pytest.param("ssdlite320_mobilenet_v3_large", marks=pytest.mark.slow)])
def test_all_weights_get_gradients_even_from_empty_images(name: str) -> None:
    """DDP waits for the gradients of all."""
    model = build_detector(name, 3)
    images = torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8)
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    torch.stack([*model(images, [empty, empty]).values()]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    with torch.inference_mode():
        for result in model(images):
            boxes, labels = result["boxes"], result["labels"]
            assert ((boxes >= 0) & (boxes <= 96)).all() and (labels <= 3).all()


@pytest.mark.slow
def test_boxes_in_16_bits_are_as_exact_as_in_32() -> None:
    """Anchors and boxes stay in float32: bfloat16 would round coordinates above 256 to multiples of 2."""
    torch.manual_seed(0)
    model = build_detector("tiny", 3).eval()
    images = torch.randint(256, (1, 3, 512, 512), dtype=torch.uint8)
    with torch.inference_mode(), Precision("bf16", torch.device("cpu")).autocast():
        (result,) = model(images)
    boxes = result["boxes"]
    assert boxes.dtype == torch.float32
    far = boxes[(boxes > 256) & (boxes < 512)]
    assert len(far) and (far != far.bfloat16().float()).float().mean() > 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_data": "/val"}, "--val-data /val --data"),
        ({"annotations": "a.json"}, "--annotations a.json --data"),
        ({"compile": True}, "--compile"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        Config(**options)
