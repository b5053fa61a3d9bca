"""Sources of COCO's annotations: what is kept, what is left out, and what is refused by name."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from raydali.data.index.coco import Coco
from raydali.data.index.coco_folder import one_split, train_and_val
from raydali.data.index.exclusion import exclude
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.pictures import encoded, photograph

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
IMAGES = [
    {"id": 90, "file_name": "b.jpg", "height": 40, "width": 60},
    {"id": 12, "file_name": "below/a.jpg", "height": 40, "width": 60},
    {"id": 55, "file_name": "c.jpg"},
]
ANNOTATIONS: list[dict[str, Any]] = [
    {"id": 1, "image_id": 55, "category_id": 7, "bbox": [1, 2, 10, 20], "iscrowd": 0},
    {"id": 2, "image_id": 90, "category_id": 3, "bbox": [0.5, 0, 4.25, 8], "iscrowd": 1},
    {"id": 3, "image_id": 55, "category_id": 3, "bbox": [5, 5, 5, 5]},
]


def content(**parts: Any) -> dict[str, Any]:
    return {"images": IMAGES, "annotations": ANNOTATIONS, "categories": CATEGORIES} | parts


def write(root: Path, made: Any, name: str = "boxes.json") -> str:
    for image in IMAGES:
        file = root / "images" / str(image["file_name"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(made if isinstance(made, str) else json.dumps(made))
    return str(root / name)


def source(root: Path, **parts: Any) -> Coco:
    return Coco.from_file(write(root, content(**parts)), str(root / "images"))


def test_images_boxes_labels_and_crowds(tmp_path: Path) -> None:
    coco = source(tmp_path)
    assert len(coco) == 3
    assert [coco.path(id) for id in range(3)] == [
        f"{tmp_path}/images/{name}" for name in ("b.jpg", "below/a.jpg", "c.jpg")
    ]
    assert coco.image_ids.tolist() == [90, 12, 55]
    assert coco.sizes.tolist() == [[40, 60], [40, 60], [0, 0]]
    assert coco.classes == ("cat", "dog") and coco.category_ids.tolist() == [3, 7]
    assert [coco.boxes_of(id) for id in range(3)] == [slice(0, 1), slice(1, 1), slice(1, 3)] and coco.most_boxes == 2
    assert coco.boxes.tolist() == [[0.5, 0, 4.75, 8], [1, 2, 11, 22], [5, 5, 10, 10]]
    assert coco.labels.tolist() == [1, 2, 1] and coco.crowd.tolist() == [True, False, False]
    assert [array.dtype.name for array in (coco.boxes, coco.labels, coco.crowd)] == ["float32", "int64", "bool"]


def test_no_boxes_at_all(tmp_path: Path) -> None:
    coco = source(tmp_path, annotations=[])
    assert coco.boxes.shape == (0, 4) and coco.first_boxes.tolist() == [0] * 4 and coco.most_boxes == 0


def test_boxes_of_no_extent_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flat = [
        ANNOTATIONS[0] | {"id": 10 + i, "bbox": box}
        for i, box in enumerate(([1, 2, 0, 5], [1, 2, 5, 0], [9, 9, -1, 4]))
    ]
    with caplog.at_level(logging.WARNING):
        coco = source(tmp_path, annotations=[*flat, *ANNOTATIONS])
    assert mentions(caplog.text, "annotations 10 11 12")
    assert coco.boxes.tolist() == source(tmp_path).boxes.tolist()


def test_ids_as_other_tools_write_them(tmp_path: Path) -> None:
    images = [image | {"id": kind(image["id"])} for image, kind in zip(IMAGES, (str, float, int), strict=True)]
    categories = [one | {"id": str(one["id"])} for one in CATEGORIES]
    annotations = [
        one | {"id": f"{i}e-uuid", "image_id": float(one["image_id"]), "category_id": str(one["category_id"])}
        for i, one in enumerate(ANNOTATIONS)
    ]
    coco = source(tmp_path, images=images, annotations=annotations, categories=categories)
    assert coco.fingerprint == source(tmp_path).fingerprint
    largest = [IMAGES[0] | {"id": 2**63 - 1}, IMAGES[1] | {"id": -(2**63)}, IMAGES[2]]
    assert source(tmp_path, images=largest, annotations=[]).image_ids.tolist() == [2**63 - 1, -(2**63), 55]


def test_crowds_as_text(tmp_path: Path) -> None:
    annotations = [one | {"iscrowd": flag} for one, flag in zip(ANNOTATIONS, ("0", "1", None), strict=True)]
    assert source(tmp_path, annotations=annotations).fingerprint == source(tmp_path).fingerprint


BOXES: dict[str, tuple[list[list[float]], str]] = {  # in an image of 60 x 40
    "corners": ([[5, 5, 20, 30], [30, 20, 50, 38]], "annotation 11 [30, 20, 50, 38] 60x40 corners"),
    "fractions": ([[0, 0, 1, 1], [0.25, 0.5, 0.5, 0.5]], "annotation 10 [0, 0, 1, 1] 60x40 fractions"),
}


@pytest.mark.parametrize("case", BOXES)
def test_boxes_of_another_form(case: str, tmp_path: Path) -> None:
    boxes, values = BOXES[case]
    annotations = [ANNOTATIONS[1] | {"id": 10 + i, "bbox": box} for i, box in enumerate(boxes)]
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/boxes.json {values} x, y, width, height")):
        source(tmp_path, annotations=annotations)


@pytest.mark.parametrize(
    "boxes",
    [
        [[0, 0, 1, 1]],  # a pixel
        [[0, 0, 60, 40], [1, 1, 59.9, 39.9], [30, 20, 30, 20]],  # a whole image, rounded
        [[30, 20, 50, 38], [50, 30, 10, 10]],  # reaches past the image, and the other is no corner
    ],
)
def test_boxes_that_may_be_right(boxes: list[list[float]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    annotations = [ANNOTATIONS[1] | {"id": 10 + i, "bbox": box} for i, box in enumerate(boxes)]
    assert len(source(tmp_path, annotations=annotations).boxes) == len(boxes) and not caplog.text


def test_boxes_outside_of_their_image_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boxes = [[1, 1, 9, 9], [60, 5, 20, 10], [-9, 5, 9, 10]]
    annotations = [ANNOTATIONS[1] | {"id": 10 + i, "bbox": box} for i, box in enumerate(boxes)]
    assert len(source(tmp_path, annotations=annotations).boxes) == 3
    assert mentions(caplog.text, f"{tmp_path}/boxes.json 2 boxes annotation 11 [60, 5, 20, 10] 60x40")


def test_two_categories_of_one_name(tmp_path: Path) -> None:
    same = [*CATEGORIES, {"id": 9, "name": "cat"}]
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/boxes.json 3 9 'cat' rename")):
        source(tmp_path, categories=same)


def test_another_place_is_the_same_data_and_another_box_is_not(tmp_path: Path) -> None:
    coco = source(tmp_path)
    assert coco.relocate("/elsewhere").fingerprint == coco.fingerprint == pickle.loads(pickle.dumps(coco)).fingerprint
    assert coco.relocate("/elsewhere").path(0) == "/elsewhere/b.jpg"
    for name, value in (("bbox", [1, 2, 10, 21]), ("category_id", 3), ("iscrowd", 1), ("image_id", 12)):
        other = source(tmp_path, annotations=[ANNOTATIONS[0] | {name: value}, *ANNOTATIONS[1:]])
        assert other.fingerprint != coco.fingerprint, name
    others = [{"id": 7, "name": "wolf"}, CATEGORIES[1]]
    assert source(tmp_path, categories=others).fingerprint != coco.fingerprint


def changed(index: int = 0, **fields: Any) -> dict[str, Any]:
    annotations = [dict(one) for one in ANNOTATIONS]
    annotations[index] |= fields
    return content(annotations=annotations)


WRONG = {
    "no-json": ("{", "boxes.json JSON"),
    "no-object": ("[1]", 'boxes.json "images"'),
    "no-annotations": ({"images": IMAGES, "categories": CATEGORIES}, 'boxes.json "annotations"'),
    "no-images": (content(images=[]), 'boxes.json "images"'),
    "no-categories": (content(categories=[]), 'boxes.json "categories"'),
    "no-name": (content(images=[{"id": 5}]), '"file_name" image 5 missing'),
    "no-id": (content(categories=[{"name": "cat"}]), '"id" category None missing'),
    "id-of-a-word": (content(images=[{"id": "x", "file_name": "b.jpg"}]), "\"id\" image x 'x'"),
    "id-too-large": (content(images=[IMAGES[0] | {"id": 2**63}]), f'"id" image {2**63} 64'),
    "id-of-a-half": (changed(image_id=1.5), '"image_id" annotation 1 1.5'),
    "crowd-of-a-word": (changed(iscrowd="some"), "\"iscrowd\" annotation 1 'some'"),
    "backslashes": (content(images=[IMAGES[0] | {"file_name": "c\\b.jpg"}]), "boxes.json c\\b.jpg slashes"),
    "image-twice": (content(images=[IMAGES[0], *IMAGES]), "image 90"),
    "category-twice": (content(categories=[*CATEGORIES, CATEGORIES[0]]), "category 7"),
    "annotation-twice": (content(annotations=[*ANNOTATIONS, ANNOTATIONS[0]]), "annotation 1"),
    "unknown-image": (changed(image_id=4), "annotation 1 image 4"),
    "unknown-category": (changed(1, category_id=8), "annotation 2 category 8"),
    "no-box": (changed(bbox=None), '"bbox" annotation 1 None'),
    "box-of-three": (changed(2, bbox=[1, 2, 3]), '"bbox" annotation 3 [1, 2, 3]'),
    "box-of-words": (changed(bbox=["1", "2", "3", "4"]), '"bbox" annotation 1'),
    "box-of-nan": (changed(bbox=[1, 2, 3, float("nan")]), '"bbox" annotation 1 nan'),
    "missing-files": (
        content(images=[image | {"file_name": f"gone/{image['id']}.jpg"} for image in IMAGES]),
        "3 images boxes.json /images/gone/90.jpg",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_annotations_are_refused_by_name(case: str, tmp_path: Path) -> None:
    made, values = WRONG[case]
    with pytest.raises(UsageError, match=mentioning(values)):
        Coco.from_file(write(tmp_path, made), str(tmp_path / "images"))


def test_a_missing_image_can_be_left_out(tmp_path: Path) -> None:
    whole = source(tmp_path)
    coco = source(tmp_path, images=[IMAGES[0], {"id": 1, "file_name": "gone.jpg"}, *IMAGES[1:]])
    assert coco.missing == (1,)
    with pytest.raises(UsageError, match=mentioning("1 4 /images/gone.jpg")):
        exclude(None, coco)
    (tmp_path / "list.txt").write_text("gone.jpg\n")
    (rest,) = exclude(str(tmp_path / "list.txt"), coco)
    assert not rest.missing and rest.fingerprint == whole.fingerprint


def test_missing_annotations_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("none.json instances_train2017.json")):
        Coco.from_file(str(tmp_path / "none.json"), str(tmp_path))
    with pytest.raises(UsageError, match=mentioning("nowhere images")):
        Coco.from_file(write(tmp_path, content()), str(tmp_path / "nowhere"))


# As other tools write them


def test_paths_of_other_machines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = "/data/upload/1/b.jpg", "images/below/a.jpg", "c.jpg"
    images = [image | {"file_name": path} for image, path in zip(IMAGES, paths, strict=True)]
    assert source(tmp_path, images=images).fingerprint == source(tmp_path).fingerprint
    assert mentions(caplog.text, "boxes.json 2 b.jpg /data/upload/1/b.jpg")
    images[2] = images[2] | {"file_name": "/data/upload/2/b.jpg"}
    with pytest.raises(UsageError, match=mentioning("boxes.json 90 55 'b.jpg'")):
        source(tmp_path, images=images)


def test_annotations_without_ids(tmp_path: Path) -> None:
    without = [{name: value for name, value in one.items() if name != "id"} for one in ANNOTATIONS]
    assert source(tmp_path, annotations=without).fingerprint == source(tmp_path).fingerprint
    without[1]["bbox"] = None
    with pytest.raises(UsageError, match=mentioning('"bbox" 2 None')):
        source(tmp_path, annotations=[without[0], without[1] | {"id": None}])


ROOT = [
    {"id": 0, "name": "animals", "supercategory": "none"},
    *(one | {"supercategory": "animals"} for one in CATEGORIES),
]


def test_the_root_category_of_roboflow_is_no_class(tmp_path: Path) -> None:
    assert source(tmp_path, categories=ROOT).fingerprint == source(tmp_path).fingerprint
    used = [*ANNOTATIONS, ANNOTATIONS[0] | {"id": 4, "category_id": 0}]
    assert source(tmp_path, categories=ROOT, annotations=used).classes == ("animals", "cat", "dog")
    flat = [one | {"supercategory": "none"} for one in CATEGORIES]
    assert source(tmp_path, categories=flat, annotations=[]).classes == ("cat", "dog")


def test_a_folder_as_roboflow_exports_it(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        write(tmp_path, content(categories=ROOT), "images/_annotations.coco.json")
        (tmp_path / "images").rename(tmp_path / name)
    train, val = train_and_val(str(tmp_path))
    assert (train.root, val.root) == (f"{tmp_path}/train", f"{tmp_path}/valid") and train.classes == ("cat", "dog")
    assert one_split(f"{tmp_path}/test", "val").path(0) == f"{tmp_path}/test/b.jpg"


# What people name


def shipped(root: Path, *names: str, **parts: Any) -> Path:
    """A folder as COCO ships."""
    for name in names:
        write(root, content(**parts), f"annotations/instances_{name}.json")
        (root / "images").rename(root / name)
    return root


@pytest.mark.parametrize("names", [("train", "val"), ("train2017", "val2017")])
def test_a_folder_as_coco_ships(names: tuple[str, str], tmp_path: Path) -> None:
    train, val = train_and_val(str(shipped(tmp_path, *names)))
    assert (train.root, val.root) == (f"{tmp_path}/{names[0]}", f"{tmp_path}/{names[1]}")
    assert len(train) == len(val) == 3


def test_four_paths(tmp_path: Path) -> None:
    file, images = write(tmp_path, content()), str(tmp_path / "images")
    train, val = train_and_val(images, file, images, file)
    assert train.fingerprint == val.fingerprint
    with pytest.raises(UsageError, match=mentioning("--annotations --val-data --val-annotations")):
        train_and_val(images, file, images)


def test_folders_that_are_not_as_coco_ships_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("annotations folder")):
        train_and_val(str(tmp_path))
    root = shipped(tmp_path, "train2017", "val2017")
    write(root, content(), "annotations/instances_train2014.json")
    with pytest.raises(UsageError, match=mentioning("instances_train2014.json instances_train2017.json")):
        train_and_val(str(root))
    for file in root.glob("annotations/*train*"):
        file.unlink()
    with pytest.raises(UsageError, match=mentioning("instances_train.json --annotations")):
        train_and_val(str(root))


def test_sets_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    shipped(tmp_path, "train")
    shipped(tmp_path, "val", categories=[{"id": 7, "name": "wolf"}, CATEGORIES[1]])
    with pytest.raises(UsageError, match=mentioning("7 dog")):
        train_and_val(str(tmp_path))
    write(tmp_path, content(annotations=[ANNOTATIONS[1]]), "annotations/instances_val.json")
    with pytest.raises(UsageError, match=mentioning("annotations val iscrowd=1")):
        train_and_val(str(tmp_path))


def test_contents_of_files(tmp_path: Path) -> None:
    coco = source(tmp_path)
    data = encoded(photograph("china", (60, 40)))
    Path(coco.path(1)).write_bytes(data)
    assert coco.read(1) == data
