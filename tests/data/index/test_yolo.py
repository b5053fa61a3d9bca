"""Sources of YOLO's folders: the boxes are COCO's, sizes are those of upright images, and what is wrong is named."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raydali.data.builtin.shapes import shapes_folder
from raydali.data.index.coco import Coco
from raydali.data.index.coco_folder import one_split, train_and_val
from raydali.data.index.exclusion import exclude
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.pictures import encoded, oriented
from tests.support.yolo import FOLDERS, shapes_in_yolo

NAMES = "names: [cat, dog]\n"
TURNED = 6


def image(width: int = 60, height: int = 40, kind: str = "JPEG", orientation: int = 1) -> bytes:
    return encoded(Image.new("RGB", (width, height), (90, 120, 30)), kind, exif=oriented(orientation))


def grow(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def files(described: str = FOLDERS + NAMES) -> dict[str, str | bytes]:
    """A data set as Ultralytics has it: a box in each of two images, and one image without."""
    return {
        "data.yaml": described,
        "images/train/b.jpg": image(),
        "labels/train/b.txt": "1 0.5 0.5 0.2 0.5\n\n0 0.25 0.5 0.5 1.0\r\n",
        "images/train/a/turned.jpg": image(orientation=TURNED),
        "labels/train/a/turned.txt": "0.0 0.5 0.5 0.5 0.1",
        "images/train/none.png": image(kind="PNG"),
        "images/val/c.bmp": image(20, 10, "BMP"),
        "labels/val/c.txt": "0 0.5 0.5 1 1.000001",
    }


def assert_equal(one: Coco, other: Coco) -> None:
    for name in ("sizes", "first_boxes", "labels", "category_ids", "crowd"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(one.boxes, other.boxes) and one.classes == other.classes


def test_boxes_in_pixels_of_upright_images(tmp_path: Path) -> None:
    train, val = train_and_val(str(grow(tmp_path, files())))
    assert [*train.relative_paths()] == [f"images/train/{name}" for name in ("a/turned.jpg", "b.jpg", "none.png")]
    assert train.sizes.tolist() == [[60, 40], [40, 60], [40, 60]]
    assert train.boxes.tolist() == [[10, 27, 30, 33], [24, 10, 36, 30], [0, 0, 30, 40]]
    assert train.first_boxes.tolist() == [0, 1, 3, 3] and train.labels.tolist() == [1, 2, 1]
    assert train.classes == ("cat", "dog") and train.category_ids.tolist() == [0, 1] and not train.crowd.any()
    assert val.boxes.round(3).tolist() == [[0, 0, 20, 10]] and val.category_ids.tolist() == [0, 1]


def test_boxes_are_those_of_coco(tmp_path: Path) -> None:
    for yolo, coco in zip(train_and_val(str(shapes_in_yolo(tmp_path))), train_and_val(shapes_folder()), strict=True):
        np.testing.assert_allclose(yolo.boxes, coco.boxes, atol=1e-4)
        for name in ("sizes", "first_boxes", "labels"):
            assert np.array_equal(getattr(yolo, name), getattr(coco, name))
        assert yolo.classes == coco.classes and yolo.category_ids.tolist() == [10, 20, 30]


# Where images are


def test_a_folder_as_roboflow_exports_it(tmp_path: Path) -> None:
    expected = train_and_val(str(grow(tmp_path / "plain", files())))
    described = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: ['cat', 'dog']\n"
    moved = {}
    for name, content in files().items():
        if "/" in name:
            kind, split, rest = name.split("/", 2)
            moved["/".join((split.replace("val", "valid"), kind, rest))] = content
    root = grow(tmp_path / "x", {"data.yaml": described, **moved})
    grow(tmp_path, {"train/images/another.jpg": image()})  # what the path means in the file system
    for data in (str(root), str(root / "data.yaml")):
        for one, other in zip(train_and_val(data), expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize(
    "described",
    [
        "path: .\n" + FOLDERS,
        "path: ../set\n" + FOLDERS,
        "path: datasets/set\n" + FOLDERS,
        "path: /content/datasets/set\n" + FOLDERS,
        "path: {root}\n" + FOLDERS,
        "train: {root}/images/train\nval: ./images/val/\n",
        "path: images\ntrain: train\nval: [val]\n",
        "train: [images/train/a, train.txt]\nval: val.txt\n",
    ],
)
def test_where_images_are(described: str, tmp_path: Path) -> None:
    expected = train_and_val(str(grow(tmp_path / "plain", files())))
    root = grow(tmp_path / "set", files(described.format(root=tmp_path / "set") + "names: {0: cat, 1: dog}"))
    grow(root, {"train.txt": "./images/train/b.jpg\n\nimages/train/none.png\n", "val.txt": f"{root}/images/val/c.bmp"})
    found = train_and_val(str(root))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
        if "path: images" not in described and ".txt" not in described:
            assert one.fingerprint == other.fingerprint and one.root in (str(root), f"{tmp_path}/set")


def test_labels_beside_images_that_are_in_no_folder_images(tmp_path: Path) -> None:
    root = grow(
        tmp_path, {"my.yml": "train: obj\nval: obj\n" + NAMES, "obj/a.jpg": image(), "obj/a.txt": "0 .5 .5 .5 .5"}
    )
    assert one_split(f"{root}/my.yml", "train").boxes.tolist() == [[15, 10, 45, 30]]


def test_a_listed_image_that_is_missing_can_be_left_out(tmp_path: Path) -> None:
    root = grow(tmp_path, files("train: train.txt\nval: images/val\n" + NAMES))
    grow(root, {"train.txt": "images/train/gone.jpg\nimages/train/b.jpg\n", "labels/train/gone.txt": "0 .5 .5 .5 .5"})
    train = one_split(str(root), "train")
    assert train.missing == (1,) and train.boxes.tolist() == [[24, 10, 36, 30], [0, 0, 30, 40]]
    with pytest.raises(UsageError, match=mentioning("images/train/gone.jpg")):
        exclude(None, train)


def test_in_a_bucket(s3: PutObjects, tmp_path: Path) -> None:
    made = files("train: ../images/train\nval: images/val\n" + NAMES)
    expected = train_and_val(str(grow(tmp_path, made)))
    s3("boxes", {f"set/{name}": (tmp_path / name).read_bytes() for name in made})
    for data in ("s3://boxes/set", "s3://boxes/set/data.yaml"):
        for one, other in zip(train_and_val(data), expected, strict=True):
            assert_equal(one, other)
            assert one.fingerprint == other.fingerprint and one.root == "s3://boxes/set"


# What is warned of, and what is refused


def test_broken_images_and_empty_boxes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = grow(tmp_path, files())
    grow(root, {"images/train/x.jpg": b"no image", "labels/train/x.txt": "0 .5 .5 .5 .5"})
    grow(root, {"images/train/z.jpg": image(), "labels/train/z.txt": "0 .5 .5 0 .5\n0 .5 .5 .5 .5"})
    with caplog.at_level(logging.WARNING):
        train = one_split(str(root), "train")
    assert np.diff(train.first_boxes).tolist() == [1, 2, 0, 0, 1] and train.sizes[3].tolist() == [0, 0]
    assert mentions(caplog.text, "data.yaml sizes images/train/x.jpg")
    assert mentions(caplog.text, "left out labels/train/z.txt") and "x.txt" not in caplog.text
    assert not train.missing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels/train/b.txt": "0 .5 .5 .5 .5\n1 .5 .5 .5 .5 .9"}, "labels/train/b.txt line 2 6 5 confidence"),
        ({"labels/train/b.txt": "0 .1 .1 .5 .1 .5 .5 .1 .5"}, "labels/train/b.txt line 1 9 5 polygon"),
        ({"labels/train/b.txt": "0 .5 .5\n"}, "labels/train/b.txt line 1 3 5"),
        ({"labels/train/b.txt": "\n2 .5 .5 .5 .5"}, "labels/train/b.txt line 2 2 data.yaml name"),
        ({"labels/train/b.txt": "cat .5 .5 .5 .5"}, "labels/train/b.txt line 1 cat data.yaml"),
        ({"labels/train/b.txt": "0.5 .5 .5 .5 .5"}, "labels/train/b.txt line 1 0.5 data.yaml"),
        ({"labels/train/b.txt": "0 30 20 12 20"}, "labels/train/b.txt line 1 30 1"),
        ({"labels/train/b.txt": "0 .5 .5 .5 1.01"}, "labels/train/b.txt line 1 1.01 1"),
        ({"labels/train/b.txt": "0 -.5 .5 .5 .5"}, "labels/train/b.txt line 1 -.5"),
        ({"labels/train/b.txt": "0 nan .5 .5 .5"}, "labels/train/b.txt line 1 nan"),
        ({"labels/train/b.txt": b"0 .5 .5 \xff .5"}, "labels/train/b.txt line 1"),
        ({"data.yaml": FOLDERS}, "data.yaml names"),
        ({"data.yaml": FOLDERS + "names: 2"}, "data.yaml names"),
        ({"data.yaml": FOLDERS + "names: {cat: 0}"}, "data.yaml names"),
        ({"data.yaml": FOLDERS + "names: [[cat]]"}, "data.yaml names"),
        ({"data.yaml": "- cat"}, "data.yaml names"),
        ({"data.yaml": FOLDERS + "nc: 3\n" + NAMES}, "data.yaml nc 3 2 names"),
        ({"data.yaml": FOLDERS + "names: [cat, dog, cat]"}, "data.yaml cat 2"),
        ({"data.yaml": FOLDERS + "names: [cat\n"}, "data.yaml line"),
        ({"data.yaml": "val: images/val\n" + NAMES}, "data.yaml train images/train"),
        ({"data.yaml": "train: {a: b}\n" + NAMES}, "data.yaml train images/train"),
        ({"data.yaml": "train: images/training\n" + NAMES}, "data.yaml train images/training path"),
        ({"data.yaml": "train: empty\n" + NAMES, "empty/a.txt": ""}, "data.yaml train empty .jpg"),
        (
            {"data.yaml": "train: lost\n" + NAMES, "lost/images/a.jpg": b""},
            "data.yaml 1 lost/images/a.jpg lost/labels/a.txt",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: dict[str, str | bytes], message: str, tmp_path: Path) -> None:
    root = grow(tmp_path, files() | change)
    with pytest.raises(UsageError, match=mentioning(message)) as error:
        one_split(str(root), "train")
    assert "\n" not in str(error.value)


def test_names_are_texts_also_those_that_yaml_reads_as_truth_values(tmp_path: Path) -> None:
    assert one_split(str(grow(tmp_path, files(FOLDERS + "nc: 2\nnames: [no, 2]"))), "train").classes == ("no", "2")


def test_a_folder_without_its_description_is_refused(tmp_path: Path) -> None:
    root = grow(tmp_path, files())
    (root / "data.yaml").unlink()
    with pytest.raises(UsageError, match=mentioning("images/ labels/ data.yaml names train val")):
        train_and_val(str(root))
    with pytest.raises(UsageError, match=mentioning("data.yaml cannot be read")):
        train_and_val(f"{root}/data.yaml")


def test_a_label_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    grow(tmp_path, files() | {"labels/train/none.txt/a": b""})
    with pytest.raises(UsageError, match=mentioning("labels/train/none.txt cannot be read")):
        one_split(str(tmp_path), "train")
