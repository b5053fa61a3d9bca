"""Images with boxes on the CPU: boxes follow crop, fit and flip; DALI is Pillow; each image once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.index.coco import Coco
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.detection import FILL, PADDING, TrainImages, ValidationImages, fitted, moved, padded, unfitted
from raydali.errors import DataError, UsageError
from tests.support.messages import mentioning
from tests.support.pictures import assert_like_pillow, encoded, one_batch, oriented, photograph

DECODING: tuple[LoaderName, ...] = ("dali", "torch")
SIDE = 96


def coco(root: Path, images: list[bytes], sizes: list[tuple[int, int]], boxes: dict[int, list[list[float]]]) -> Coco:
    """A source of these files; a box is left, top, width, height, then category and iscrowd."""
    (root / "images").mkdir(parents=True)
    for id, data in enumerate(images):
        (root / "images" / f"{id:02}.img").write_bytes(data)
    listed = [
        {"id": id, "file_name": f"{id:02}.img", "height": height, "width": width}
        for id, (height, width) in enumerate(sizes)
    ]
    annotations = [
        {"image_id": id, "bbox": box[:4], "category_id": int(box[4]), "iscrowd": int(box[5])}
        for id, of_image in boxes.items()
        for box in of_image
    ]
    content = {
        "images": listed,
        "annotations": [{"id": i} | one for i, one in enumerate(annotations)],
        "categories": [{"id": i, "name": str(i)} for i in (1, 2)],
    }
    (root / "boxes.json").write_text(json.dumps(content))
    return Coco.from_file(str(root / "boxes.json"), str(root / "images"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Coco:
    """Dark images of many shapes, each with one bright rectangle, which is its box."""
    random = np.random.default_rng(0)
    images, sizes, boxes = [], [], {}
    for id in range(24):
        height, width = random.integers(60, 200, 2).tolist()
        high, wide = random.integers(20, 50, 2).tolist()
        top, left = int(random.integers(0, height - high)), int(random.integers(0, width - wide))
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[top : top + high, left : left + wide] = 255
        images.append(encoded(Image.fromarray(pixels), "PNG"))
        sizes.append((height, width))
        boxes[id] = [[left, top, wide, high, 1 + id % 2, 0]]
    return coco(tmp_path_factory.mktemp("filled"), images, sizes, boxes)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Coco:
    """Photographs in several formats and turned by EXIF, with 0 to 3 boxes each; every fourth is of a crowd."""
    random = np.random.default_rng(1)
    images, sizes, boxes = [], [], {}
    for id in range(12):
        image = photograph(("china", "flower")[id % 2], (150 + 9 * id, 140 - 5 * id))
        orientation = 1 + id % 8
        images.append(encoded(image, ("JPEG", "PNG", "WEBP")[id % 3], exif=oriented(orientation)))
        sizes.append((image.width, image.height) if orientation > 4 else (image.height, image.width))
        boxes[id] = [[*random.uniform(0, 60, 2), *random.uniform(5, 60, 2), 1, i == 3] for i in range(id % 4)]
    return coco(tmp_path_factory.mktemp("photographs"), images, sizes, boxes)


def bright(image: torch.Tensor) -> np.ndarray:
    """Left, top, right, bottom of what is white in an image (3, side, side)."""
    rows, columns = np.nonzero((image > 250).all(0).numpy())
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


@pytest.mark.parametrize("name", DECODING)
def test_boxes_follow_crop_and_flip(name: LoaderName, filled: Coco) -> None:
    """In six epochs of windows and flips, each box that is kept lies where its rectangle is seen."""
    pipeline = TrainImages(image_size=SIDE, seed=5, max_boxes=1, crop_probability=0.7)
    stream = Stream(samples=len(filled), epochs=6, batch_size=12, global_batch_size=12, seed=0)
    kept = 0
    with make_loader(name, filled, pipeline, stream) as loader:
        for batch in loader:
            for id, image, (box,), (label,) in zip(
                batch.ids, batch["images"], batch["boxes"], batch["labels"], strict=True
            ):
                if label == PADDING:
                    assert not box.any()
                    continue
                assert label == 1 + id % 2
                # The resized edge is grey over as many pixels as one is scaled up to, at most four.
                np.testing.assert_allclose(bright(image), box.numpy(), atol=3.5)
                kept += 1
    assert 100 < kept < 6 * len(filled)


def test_flips_and_crops_are_drawn_as_often_as_asked() -> None:
    ids, epochs = np.arange(4000), np.zeros(4000, np.int64)
    for probability in (0.0, 0.3, 1.0):
        options: Any = {"crop_probability": probability, "flip_probability": 1 - probability}
        _, crops, flips = TrainImages(image_size=SIDE, seed=0, max_boxes=1, **options).draws(ids, epochs)
        assert crops.mean() == pytest.approx(probability, abs=0.03)
        assert flips.mean() == pytest.approx(1 - probability, abs=0.03)


def test_what_a_window_shows_of_a_box() -> None:
    """A window of 50 x 100 pixels from (top 10, left 20), in a square of 200: scaled by 2, 50 pixels of grey above."""
    boxes = np.array(
        [
            [
                [30, 20, 40, 30],  # inside
                [0, 20, 30, 30],  # its centre is left of the window
                [0, 0, 50, 30],  # its centre is inside, two sides are cut off
                [110, 50, 129, 69],  # two others
                [20, 10, 120, 60],  # the window itself
            ]
        ],
        np.float32,
    )
    starts, sizes = np.array([[10, 20]]), np.array([[50, 100]])
    expected = [[20, 70, 40, 90], [0, 50, 60, 90], [180, 130, 200, 150], [0, 50, 200, 150], [0, 0, 0, 0]]
    ours, labels = moved(boxes, np.array([[1, 2, 3, 4, 5]]), starts, sizes, np.array([0], np.int32), 200)
    assert labels.tolist() == [[1, 3, 4, 5, PADDING]]
    np.testing.assert_allclose(ours[0], expected)
    flipped, _ = moved(boxes, np.array([[1, 2, 3, 4, 5]]), starts, sizes, np.array([1], np.int32), 200)
    np.testing.assert_allclose(flipped[0, :4], [[200 - r, t, 200 - x, b] for x, t, r, b in expected[:4]])


def test_a_box_thinner_than_float32_tells_is_dropped() -> None:
    thin = np.array([[[1, 10, np.nextafter(np.float32(1), np.float32(2)), 20]]], np.float32)
    size, flips = np.array([[100, 100]]), np.array([1], np.int32)  # flipped it lies at 99, where float32 is coarser
    _, labels = moved(thin, np.array([[1]]), np.array([[0, 0]]), size, flips, 100)
    assert labels.tolist() == [[PADDING]]


def test_empty_images_and_crowds_have_no_boxes_to_learn(photographs: Coco) -> None:
    boxes, labels = padded(photographs, np.arange(12), 3)
    assert (labels[[0, 4, 8]] == PADDING).all() and (boxes[[0, 4, 8]] == 0).all()
    assert (labels[1] == [1, PADDING, PADDING]).all()
    crowded = replace(photographs, crowd=np.ones(len(photographs.boxes), bool))
    assert (padded(crowded, np.arange(12), 3)[1] == PADDING).all()


@pytest.mark.parametrize("name", DECODING)
def test_more_boxes_than_there_is_room_for_are_refused(name: LoaderName, photographs: Coco) -> None:
    pipeline = TrainImages(image_size=SIDE, seed=0, max_boxes=2)
    order = OrderedPass(samples=12, batch_size=12)
    with (
        make_loader(name, photographs, pipeline, order) as loader,
        pytest.raises(DataError, match=mentioning("03.img 3 2 max_boxes")),
    ):
        next(iter(loader))


@pytest.mark.parametrize("side", [33, 96, 300])
def test_dali_is_pillow(side: int, photographs: Coco) -> None:
    train = TrainImages(image_size=side, seed=3, max_boxes=4)
    whole = ValidationImages(image_size=side)
    for pipeline in (train, whole):
        images, *others = one_batch(pipeline, photographs, epochs=2)
        for id in range(12):
            image, *expected = pipeline.sample(photographs, id, 2)
            assert_like_pillow(images[id], image)
            for ours, theirs in zip(others, expected, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours[id], theirs)


def test_validation_fits_whole_images_and_boxes_come_back(filled: Coco) -> None:
    images, sizes = one_batch(ValidationImages(image_size=SIDE), filled)
    assert torch.equal(sizes, torch.from_numpy(filled.sizes))
    for id, image in enumerate(images):
        size = filled.sizes[id]
        height, width = fitted(size, SIDE).tolist()
        assert max(height, width) == SIDE
        grey = (image == torch.tensor(FILL)[:, None, None]).all(0).sum()
        assert grey == SIDE * SIDE - height * width
        found = unfitted(bright(image)[None].astype(np.float32), size, SIDE)
        np.testing.assert_allclose(found, filled.boxes[filled.boxes_of(id)], atol=4.5)
    everywhere = unfitted(np.array([[-9, -9, 999, 999]], np.float32), np.array([50, 80]), SIDE)
    assert everywhere.tolist() == [[0, 0, 80, 50]]


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize(
    "pipeline", [TrainImages(image_size=SIDE, seed=0, max_boxes=3), ValidationImages(image_size=SIDE)]
)
def test_an_image_of_another_size_than_annotated_is_refused(name: LoaderName, pipeline: Any, photographs: Coco) -> None:
    sizes = photographs.sizes.copy()
    sizes[5] = sizes[5, ::-1]
    wrong = replace(photographs, sizes=sizes)
    height, width = photographs.sizes[5].tolist()
    message = rf"sample 5 .*05.img: {width}x{height} pixels.*but {height}x{width} in the annotations.*correct the"
    with (
        make_loader(name, wrong, pipeline, OrderedPass(samples=12, batch_size=12)) as loader,
        pytest.raises(DataError, match=message),
    ):
        next(iter(loader))
    sizes[5] = 0  # nothing annotated
    unknown = replace(photographs, sizes=sizes)
    assert len(one_batch(pipeline, unknown)[0]) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size 1 0"),
        ({"max_boxes": 0}, "max_boxes 1 0"),
        ({"crop_probability": 1.5}, "crop_probability 0 1 1.5"),
        ({"random_aspect": (2, 1)}, "random_aspect 2 1"),
    ],
)
def test_settings_out_of_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        TrainImages(**{"image_size": SIDE, "seed": 0, "max_boxes": 1} | options)
