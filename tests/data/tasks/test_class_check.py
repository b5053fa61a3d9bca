"""Before the first step: classes that nobody has, values of masks that are not classes, and images that EXIF turns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from raydali.data.index import masked_images
from raydali.data.index.coco import Coco
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.masked_images import MaskedImages, train_and_val
from raydali.data.tasks.class_check import class_warnings
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.pictures import photograph
from tests.support.trees import grow


def discs(*values: int) -> NDArray[np.uint8]:
    """A mask of 80 x 100 with a disc of each value but the first one, which is around them."""
    rows, columns = np.indices((80, 100))
    mask = np.full((80, 100), values[0], np.uint8)
    for place, value in enumerate(values[1:]):
        mask[(rows - 40) ** 2 + (columns - 15 - 30 * place) ** 2 < 150] = value
    return mask


def masked(root: Path, *masks: Any, ending: str = "png", **options: Any) -> MaskedImages:
    for folder in ("train", "val"):
        for i, mask in enumerate(masks):
            image = Image.fromarray(mask) if isinstance(mask, np.ndarray) else mask
            for kind in ("images", "masks"):
                (root / folder / kind).mkdir(parents=True, exist_ok=True)
            photograph(size=image.size).save(root / folder / f"images/{i}.jpg")
            image.save(root / folder / f"masks/{i}.{ending}", quality=30)
    return train_and_val(str(root), **options)[0]


def test_sound_sets_pass_in_silence(tmp_path: Path) -> None:
    for name, values in (("two", (0, 1)), ("void", (0, 1, 255)), ("many", (3, 0, 1, 2))):
        masks = [discs(*values), discs(*values[::-1])]
        assert [*class_warnings(masked(tmp_path / name, *masks, classes=str(max({*values} - {255}) + 1)))] == []
    walls = discs(0, 2)
    walls[:, 50] = 1  # a thin class between two others
    assert [*class_warnings(masked(tmp_path / "walls", walls, discs(2, 0), classes="3"))] == []
    assert [*class_warnings(LabeledFiles.scan(str(grow(tmp_path / "folders", ["a/1.jpg", "b/2.jpg"]))))] == []


def test_classes_of_no_sample(tmp_path: Path) -> None:
    grow(tmp_path, ["a/1.jpg", "b/2.jpg", "b/3.jpg"])
    (tmp_path / "empty").mkdir()
    (warning,) = class_warnings(source := LabeledFiles.scan(str(tmp_path)))
    assert mentions(warning, "1 of 3 'empty' 3 samples 1 to 2")
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path} 'b' alone 2 samples")):
        [*class_warnings(source.drop([0]))]
    grow(tmp_path / "one", ["cat/1.jpg"])
    with pytest.raises(UsageError, match=mentioning("'cat' only two")):
        [*class_warnings(LabeledFiles.scan(str(tmp_path / "one")))]


def test_classes_of_no_box(tmp_path: Path) -> None:
    photograph().save(tmp_path / "1.jpg")
    box = {"id": 1, "image_id": 1, "category_id": 7, "bbox": [1, 1, 9, 9]}
    content: dict[str, Any] = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [box]}
    content["categories"] = [{"id": id, "name": name} for id, name in ((3, "cat"), (7, "dog"))]
    (tmp_path / "a.json").write_text(json.dumps(content))
    (warning,) = class_warnings(Coco.from_file(str(tmp_path / "a.json"), str(tmp_path)))
    assert mentions(warning, "1 of 2 box 'cat' 1 to 1")
    content["annotations"] = []
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=mentioning("no box in 1 sample")):
        [*class_warnings(Coco.from_file(str(tmp_path / "a.json"), str(tmp_path)))]


@pytest.mark.parametrize(
    ("values", "classes", "remedy"),
    [((0, 255), "2", "0 255"), ((0, 128, 255), "3", "0 128 255"), ((1, 2, 3, 4), "4", "$(seq 1 4)")],
)
def test_values_of_another_convention(values: tuple[int, ...], classes: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path} pixel 2 masks --mask-values {remedy}")):
        [*class_warnings(masked(tmp_path, discs(*values), discs(*values), classes=classes))]
    source = masked(tmp_path, discs(*values), discs(*values), classes=classes, values=values)
    assert [*class_warnings(source)] == []
    assert np.array_equal(source.mask(0), np.searchsorted(values, discs(*values)))


def test_one_value_of_another_convention_is_a_warning(tmp_path: Path) -> None:
    source = masked(tmp_path, discs(1, 2), discs(1, 2), discs(1, 2, 3), classes="3")
    shifted, without = class_warnings(source)
    assert mentions(shifted, "--mask-values $(seq 1 3)") and mentions(without, "1 of 3 pixel 3 masks '0'")


def test_masks_whose_borders_are_blended(tmp_path: Path) -> None:
    whole = [discs(0, 10, 20), discs(20, 0, 10)]
    lossy = next(class_warnings(masked(tmp_path / "jpeg", *whole, ending="jpg", classes="21")))
    assert mentions(lossy, "2 of 2 masks JPEG PNG")
    smooth = [Image.fromarray(mask).resize((150, 120), Image.Resampling.BILINEAR) for mask in whole]
    (blended, *_) = class_warnings(masked(tmp_path / "smooth", *smooth, classes="21"))
    assert mentions(blended, "2 masks borders nearest")
    nearest = [Image.fromarray(mask).resize((150, 120), Image.Resampling.NEAREST) for mask in whole]
    (without,) = class_warnings(masked(tmp_path / "nearest", *nearest, classes="21"))
    assert mentions(without, "18 of 21 pixel 2 masks")


def test_a_sample_of_many_masks_refuses_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_images, "MOST_MASKS", 3)
    (warning,) = class_warnings(source := masked(tmp_path, *[discs(0, 0)] * 5, classes="2"))
    assert mentions(warning, "1 of 2 pixel 3 masks looked at '1'")
    assert (source.sample.masks, source.sample.is_whole) == (3, False)
    broken = masked(tmp_path / "broken", discs(0, 1), discs(0, 7), discs(0, 1), classes="2").sample
    assert (broken.masks, broken.values[7], broken.pixels[7]) == (3, (discs(0, 7) == 7).sum(), 0)
    assert broken.pixels[:2].tolist() == [2 * (discs(0, 1) == value).sum() for value in (0, 1)]


@pytest.mark.parametrize(
    ("orientation", "size"),
    [(3, (60, 40)), (4, (60, 40)), (6, (50, 50)), (1, (60, 40)), (0, (60, 40))],
)
def test_images_that_exif_turns_alone(orientation: int, size: tuple[int, int], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    for name in ("img/1.jpg", "gt/1.jpg", "img/2.jpg", "gt/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        photograph(size=size).save(tmp_path / name, exif=exif if name == "img/1.jpg" else b"")
    found = [*class_warnings(ImagePairs.scan(str(tmp_path)))]
    assert len(found) == (orientation > 1) and all(mentions(each, "1 of 2 img/1.jpg upright") for each in found)
    photograph(size=size).save(tmp_path / "gt/1.jpg", exif=exif)
    assert [*class_warnings(ImagePairs.scan(str(tmp_path)))] == []
