"""Indexes of images with masks: layouts, classes, and masks that cannot be used."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.index.masked_images import CITYSCAPES, IGNORED, VOC, MaskedImages, train_and_val
from raydali.data.load.make import make_loader
from raydali.data.read import contents
from raydali.data.read.objects import read_objects
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.segmentation import ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.broken import jpeg
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects

SIZE = 40, 30


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def grey(value: int = 1, bits: int = 8) -> Image.Image:
    """A mask whose left half has a value, and the right half 0."""
    mask = np.zeros(SIZE[::-1], np.uint16 if bits == 16 else np.uint8)
    mask[:, : SIZE[0] // 2] = value
    return Image.fromarray(mask)


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(SIZE))


def folders(root: Path, mask: Image.Image, names: tuple[str, ...] = ("a", "b/c")) -> str:
    for split in ("train", "val"):
        for name in names:
            photo(root / split / "images" / f"{name}.jpg")
            save(root / split / "masks" / f"{name}.png", mask)
    return str(root)


def test_two_folders(tmp_path: Path) -> None:
    train, val = train_and_val(folders(tmp_path, grey()), classes="2")
    assert (len(train), len(val), train.classes) == (2, 2, ("0", "1"))
    assert train.path(1).endswith("images/b/c.jpg and " + str(tmp_path / "train/masks/b/c.png"))
    mask = train.mask(0)
    assert mask.dtype == np.uint8 and mask.shape == SIZE[::-1]
    assert (mask[:, :20] == 1).all() and (mask[:, 20:] == 0).all()
    again, _ = train_and_val(str(tmp_path), classes="3")
    assert train.fingerprint != again.fingerprint, "the classes count"
    assert isinstance(train.drop([0]), MaskedImages) and train.drop([0]).classes == train.classes


def test_lists(tmp_path: Path) -> None:
    folders(tmp_path, grey())
    for split in ("train", "val"):
        lines = [f"{split}/images/{name}.jpg,{split}/masks/{name}.png" for name in ("b/c", "a")]
        (tmp_path / f"{split}.csv").write_text("image,mask\n" + "\n".join(lines) + "\n")
    train, val = train_and_val(str(tmp_path / "train.csv"), str(tmp_path / "val.csv"), classes="2")
    assert train.inputs.path(0).endswith("b/c.jpg") and train.targets.path(0).endswith("train/masks/b/c.png")
    assert (val.mask(1)[:, :20] == 1).all()
    with pytest.raises(UsageError, match=mentioning("--val-data list both")):
        train_and_val(str(tmp_path / "train.csv"), classes="2")
    (tmp_path / "val.csv").write_text("val/images/a.jpg,3\n")
    with pytest.raises(UsageError, match=mentioning("val.csv without a mask image,mask")):
        train_and_val(str(tmp_path / "train.csv"), str(tmp_path / "val.csv"), classes="2")


def test_two_folders_alone_are_split(tmp_path: Path) -> None:
    folders(tmp_path / "data", grey(), tuple(f"{i:02}" for i in range(40)))
    data = str(tmp_path / "data/train")
    sets = train_and_val(data, classes="2")
    paths = [[each.path(id) for id in range(len(each))] for each in sets]
    assert sum(map(len, paths)) == 40 and 0 < len(paths[1]) < 10 and not {*paths[0]} & {*paths[1]}
    assert all(mask.endswith(image.partition("/images/")[2].replace("jpg", "png"))
               for each in paths for image, _, mask in (path.partition(" and ") for path in each))  # fmt: skip
    _, val = train_and_val(data, classes="2", val_fraction=0.5)
    assert 10 < len(val) < 30 and {*paths[1]} < {val.path(id) for id in range(len(val))}
    whole = train_and_val(data, str(tmp_path / "data/val"), classes="2")
    assert [len(each) for each in whole] == [40, 40] and "/val/" in whole[1].path(0)
    (tmp_path / "list.csv").write_text(
        "".join(f"{data}/images/{i:02}.jpg,{data}/masks/{i:02}.png\n" for i in range(40))
    )
    assert 0 < len(train_and_val(str(tmp_path / "list.csv"), classes="2", val_fraction=0.5)[1]) < 40
    for source, group in (
        (data, r"(\d)\."),
        (str(tmp_path / "list.csv"), r"(\d)\."),
        (str(tmp_path / "list.csv"), None),
    ):
        folds = [train_and_val(source, classes="2", fold=f"{i}/4", val_group=group)[1] for i in (1, 2, 3, 4)]
        held = [{Path(path).stem for path in fold.relative_paths()} for fold in folds]
        assert sorted(name for names in held for name in names) == [f"{i:02}" for i in range(40)]
        assert group is None or all(len({name[1] for name in names}) == len(names) // 4 for names in held)
    lines = [f"{data}/images/{i:02}.jpg,{data}/masks/{i:02}.png,{i // 10}\n" for i in range(40)]
    (tmp_path / "list.csv").write_text("image,mask,place\n" + "".join(lines))
    _, val = train_and_val(str(tmp_path / "list.csv"), classes="2", fold="1/4", val_group="column:place")
    assert len(val) == 10 and len({Path(path).stem[0] for path in val.relative_paths()}) == 1
    assert (val.mask(0)[:, :20] == 1).any()
    for root, other in ((tmp_path / "data", None), (data, data)):
        with pytest.raises(UsageError, match=mentioning("--val-fraction 0.5")):
            train_and_val(str(root), other, classes="2", val_fraction=0.5)


def test_values_of_classes(tmp_path: Path) -> None:
    data = folders(tmp_path, grey(255))
    train, _ = train_and_val(data, values=(0, 255))
    assert train.classes == ("0", "255") and [train.mask(0)[0, place] for place in (0, -1)] == [1, 0]
    assert train_and_val(data, values=(255, 0), classes="2")[0].mask(0)[0, 0] == 0
    for values in ((0, 255, 7), (0, 70000)):
        with pytest.raises(UsageError, match=mentioning("--mask-values 2 65535")):
            train_and_val(data, values=values, classes="2")


def test_a_broken_first_mask_does_not_hide_the_palette(tmp_path: Path) -> None:
    mask = grey(1).convert("P")
    mask.putpalette([0, 0, 0, 9, 9, 9])
    data = folders(tmp_path, mask)
    (tmp_path / "train/masks/a.png").write_bytes(b"")
    assert train_and_val(data)[0].classes == ("0", "1")
    (tmp_path / "train/masks/b/c.png").write_bytes(b"")
    with pytest.raises(UsageError, match=mentioning("masks/a.png --classes")):
        train_and_val(data)


def test_pascal_voc(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        photo(tmp_path / f"JPEGImages/{name}.jpg")
        mask = grey(20).convert("P")
        mask.putpalette([7 * i % 256 for i in range(768)])
        save(tmp_path / f"SegmentationClass/{name}.png", mask)
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("two\none\n")
    (lists / "val.txt").write_text("three\n")
    train, val = train_and_val(str(tmp_path))
    assert train.classes == VOC and (len(train), len(val)) == (2, 1) and train.inputs.path(0).endswith("two.jpg")
    assert train.mask(0)[0, 0] == 20
    (lists / "val.txt").unlink()
    with pytest.raises(UsageError, match=mentioning("val.txt VOC unpacked")):
        train_and_val(str(tmp_path))


def test_cityscapes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        photo(tmp_path / f"leftImg8bit/{split}/ulm/ulm_1_leftImg8bit.png")
        save(tmp_path / f"gtFine/{split}/ulm/ulm_1_gtFine_labelIds.png", grey(26))
    train, _ = train_and_val(str(tmp_path))
    assert train.classes == tuple(CITYSCAPES.values()) and len(train.classes) == 19
    assert train.mask(0)[0, 0] == train.classes.index("car") and train.mask(0)[0, -1] == IGNORED
    assert train_and_val(str(tmp_path), ignored=26)[0].lookup[26] == IGNORED


def test_ade20k(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        photo(tmp_path / f"images/{split}/ADE_1.jpg")
        save(tmp_path / f"annotations/{split}/ADE_1.png", grey(150))
    train, _ = train_and_val(str(tmp_path))
    assert len(train.classes) == 150 and train.mask(0)[0, 0] == 149 and train.mask(0)[0, -1] == IGNORED
    assert train_and_val(str(tmp_path), ignored=150)[0].lookup[150] == IGNORED


def test_kinds_of_masks(tmp_path: Path) -> None:
    palette = grey(2).convert("P")
    palette.putpalette([0, 0, 0, 9, 9, 9, 5, 5, 5])
    train, _ = train_and_val(folders(tmp_path / "palette", palette))
    assert train.classes == ("0", "1", "2") and train.mask(0)[0, 0] == 2
    train, _ = train_and_val(folders(tmp_path / "bits", grey(65535, 16)), classes="2")
    assert train.mask(0)[0, 0] == IGNORED and train.mask(0)[0, -1] == 0
    train, _ = train_and_val(folders(tmp_path / "bilevel", grey(255).convert("1")), classes="2", ignored=7)
    assert train.mask(0)[0, 0] == 1
    (tmp_path / "names.txt").write_text("cell\n\nnucleus\n")
    train, _ = train_and_val(folders(tmp_path / "named", grey()), classes=str(tmp_path / "names.txt"))
    assert train.classes == ("cell", "nucleus")


def test_classes_that_are_not_known(tmp_path: Path) -> None:
    data = folders(tmp_path / "data", grey())
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    for classes, message in (
        (None, "train/masks/a.png how many classes --classes"),
        ("0", "--classes 0 not 1 254"),
        ("255", "--classes 255 not 1 254"),
        (str(tmp_path / "twice.txt"), "twice.txt 'a' more than once"),
        (str(tmp_path / "missing.txt"), "missing.txt neither a number nor a file"),
    ):
        with pytest.raises(UsageError, match=mentioning(message)):
            train_and_val(data, classes=classes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (grey(3), "the value 3, none of 2 classes --classes --ignore-index"),
        (Image.new("L", SIZE, 255), "no pixel that counts --exclude"),
        (Image.new("RGB", SIZE), "mode RGB 8 or 16 bits palette"),
        (Image.new("RGBA", SIZE), "mode RGBA"),
    ],
)
def test_masks_that_cannot_be_used(mask: Image.Image, message: str, tmp_path: Path) -> None:
    train, _ = train_and_val(folders(tmp_path, mask), classes="2")
    with pytest.raises(DataError, match=mentioning(f"masks/a.png {message}")):
        train.mask(0)


def test_empty_and_broken_masks(tmp_path: Path) -> None:
    train, _ = train_and_val(folders(tmp_path, grey()), classes="2")
    path = tmp_path / "train/masks/a.png"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=mentioning("a.png is empty")):
        train.mask(0)
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match=mentioning("a.png b'<html>40'")):
        train.mask(0)
    content = io.BytesIO()
    grey().save(content, "PNG")
    path.write_bytes(content.getvalue()[:60])
    with pytest.raises(OSError):
        train.mask(0)
    path.unlink()
    with pytest.raises(UsageError, match=mentioning("without a partner 'a'")):
        train_and_val(str(tmp_path), classes="2")


def test_masks_in_a_bucket_are_read_at_the_same_time(
    tmp_path: Path, s3: PutObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple("abcdef")
    local, _ = train_and_val(folders(tmp_path, grey(), names), classes="2")
    s3("masks", {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*.*")})
    there, _ = train_and_val("s3://masks", classes="2")
    amounts: list[int] = []

    def counted(parts: list[ObjectPart]) -> list[memoryview | OSError]:
        amounts.append(len(parts))
        return read_objects(parts)

    monkeypatch.setattr(contents, "read_objects", counted)
    pipeline = ValidationImages(canvas=(64, 64))
    with make_loader("dali", there, pipeline, OrderedPass(samples=6, batch_size=6)) as loader:
        (batch,) = loader
    assert [number for number in amounts if number] == [6, 6]  # images, masks
    assert all(torch.equal(mask[0], pipeline.sample(local, id, 0)[1][0]) for id, mask in enumerate(batch["masks"]))
