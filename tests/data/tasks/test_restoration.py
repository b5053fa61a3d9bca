"""Pairs of images on the CPU: the same window and flips for both, Pillow's pixels to the bit, each pair once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.index.image_pairs import ImagePairs
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.restoration import Pairs, TrainPairs, ValidationPairs, windows
from raydali.errors import DataError, UsageError
from tests.support.messages import mentioning
from tests.support.pictures import Keys, by_key, encoded, oriented, photograph

CROP = (24, 32)
TRAIN = TrainPairs(crop_size=CROP, seed=3)
VALIDATION = ValidationPairs(crop_size=CROP)
STREAM = Stream(samples=12, epochs=2, batch_size=2, global_batch_size=6, seed=1)
PASS = OrderedPass(samples=12, batch_size=5)
DECODING: tuple[LoaderName, ...] = ("dali", "torch")


def coordinates(height: int, width: int, id: int) -> Image.Image:
    """An image whose every pixel says where it lies: red is y, green is x; and blue whose it is."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([y, x, np.full_like(y, id)], 2).astype(np.uint8))


def write(root: Path, input: bytes, target: bytes, name: str) -> None:
    for folder, data in (("img", input), ("gt", target)):
        (root / folder / "scene").mkdir(parents=True, exist_ok=True)
        (root / folder / "scene" / name).write_bytes(data)


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> ImagePairs:
    """Pairs of one image each in several sizes, the smallest the crop's."""
    root = tmp_path_factory.mktemp("maps")
    for id in range(12):
        data = encoded(coordinates(24 + 7 * id, 32 + 5 * id, id), "PNG")
        write(root, data, data, f"{id:02}.png")
    return ImagePairs.scan(str(root))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> ImagePairs:
    """Photographs and their mirror images, in several formats and turned by EXIF."""
    root = tmp_path_factory.mktemp("photographs")
    for id in range(12):
        one = photograph(("china", "flower")[id % 2], (90 + id, 70 - id))
        other = one.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        exif = oriented(1 + id % 8)
        kind = ("JPEG", "PNG", "WEBP")[id % 3]
        write(root, encoded(one, exif=exif), encoded(other, kind, exif=exif), f"{id:02}.jpg")
    return ImagePairs.scan(str(root))


def load(name: LoaderName, source: ImagePairs, pipeline: Pairs = TRAIN, order: Any = STREAM, **options: Any) -> Keys:
    return by_key(make_loader(name, source, pipeline, order, **options))


@pytest.mark.parametrize("name", DECODING)
def test_both_get_one_window_and_the_same_flips(name: LoaderName, maps: ImagePairs) -> None:
    flips = set()
    for (id, _), (input, target) in load(name, maps).items():
        assert input.shape == (3, *CROP) and input.dtype == torch.uint8
        assert torch.equal(input, target)
        y, x, blue = input.int()
        assert (blue == id).all()
        for rows, axis in ((y, 0), (x, 1)):
            steps = rows.diff(dim=axis).unique().tolist()
            assert steps in ([1], [-1])
        flips.add((int(y[1, 0] - y[0, 0]), int(x[0, 1] - x[0, 0])))
    assert flips == {(1, 1), (1, -1), (-1, 1), (-1, -1)}


@pytest.mark.parametrize("name", DECODING)
def test_validation_takes_the_centre_as_it_is(name: LoaderName, maps: ImagePairs) -> None:
    for (id, _), (input, target) in load(name, maps, VALIDATION, PASS).items():
        assert torch.equal(input, target)
        y, x = input[0, :, 0].tolist(), input[1, 0].tolist()
        assert y[0] + y[-1] in (23 + 7 * id, 24 + 7 * id) and x[0] + x[-1] in (31 + 5 * id, 32 + 5 * id)
        assert y == sorted(y) and x == sorted(x)


@pytest.mark.parametrize(("pipeline", "order"), [(TRAIN, STREAM), (VALIDATION, PASS)])
def test_dali_gives_pillows_pixels_to_the_bit(photographs: ImagePairs, pipeline: Pairs, order: Any) -> None:
    ours, theirs = (load(name, photographs, pipeline, order) for name in DECODING)
    assert ours.keys() == theirs.keys()
    for key, (input, target) in ours.items():
        assert torch.equal(input, theirs[key][0]) and torch.equal(target, theirs[key][1])
        assert not torch.equal(input, target)


def test_windows_take_every_place_that_fits_and_no_other() -> None:
    generator = np.random.default_rng(0)
    shapes = np.repeat([[24, 32], [25, 40], [100, 33]], 3000, axis=0)
    places = generator.random((9000, 2))
    starts = windows(shapes, places, CROP)
    for i, (height, width) in enumerate([(1, 1), (2, 9), (77, 2)]):
        part = starts[3000 * i : 3000 * (i + 1)]
        counts = np.bincount(part[:, 0], minlength=height), np.bincount(part[:, 1], minlength=width)
        assert len(counts[0]) == height and len(counts[1]) == width
        assert all(((count > 0.5 * count.mean()) & (count < 1.6 * count.mean())).all() for count in counts)
    np.testing.assert_array_equal(windows(shapes, np.nextafter(np.ones((9000, 2)), 0), CROP), shapes - CROP)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_come_as_often_as_asked_and_independently(probability: float) -> None:
    _, flips = TrainPairs(crop_size=CROP, seed=0, flip_probability=probability).draws(np.arange(9000), np.arange(9000))
    expected = [probability, probability, probability**2]
    assert [*flips.mean(0), flips.prod(1).mean()] == pytest.approx(expected, abs=0.02)


def png(height: int, width: int) -> bytes:
    return encoded(photograph(size=(width, height)), "PNG")


# An input, a target, and what is said of them; b"" for no file.
UNUSABLE = {
    "input-missing": (b"", png(40, 40), "img/scene/x.png No such file"),
    "target-broken": (png(40, 40), b"no image", "gt/scene/x.png identify"),
    "target-cut-short": (png(99, 99), png(99, 99)[:9999], "gt/scene/x.png truncated"),
    "target-larger": (png(40, 40), png(41, 48), "img/scene/x.png gt/scene/x.png 40x40 48x41"),
    "target-turned": (png(40, 48), png(48, 40), "48x40 40x48"),
    "both-low": (png(23, 40), png(23, 40), "40x23 32x24"),
    "both-narrow": (png(40, 31), png(40, 31), "31x40 32x24"),
}


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_pair_that_cannot_be_used_is_named(tmp_path: Path, case: str, name: LoaderName) -> None:
    input, target, message = UNUSABLE[case]
    for i in range(4):
        write(tmp_path, png(60, 60), png(60, 60), f"{i}.png")
    write(tmp_path, input, target, "x.png")
    source = ImagePairs.scan(str(tmp_path))
    if not input:
        (tmp_path / "img/scene/x.png").unlink()
    order = OrderedPass(samples=5, batch_size=2)
    with (
        make_loader(name, source, TRAIN, order) as loader,
        pytest.raises(DataError, match=mentioning(f"sample 4 {tmp_path} {message}")),
    ):
        for _ in loader:
            pass


def test_s3(s3: Any, maps: ImagePairs) -> None:
    paths = [files.path(id) for files in (maps.inputs, maps.targets) for id in range(12)]
    s3("maps", {f"train{path.removeprefix(str(maps))}": Path(path).read_bytes() for path in paths})
    remote = ImagePairs.scan("s3://maps/train")
    for name in DECODING:
        ours, theirs = load(name, remote, VALIDATION, PASS), load(name, maps, VALIDATION, PASS)
        assert all(torch.equal(torch.stack(ours[key]), torch.stack(theirs[key])) for key in theirs)


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"crop_size .*\(0, 8\)"):
        replace(TRAIN, crop_size=(0, 8))
