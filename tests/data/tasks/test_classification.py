"""Images on the CPU: DALI's pixels against torchvision's, of every kind of file, whatever the batch they come in."""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from raydali.data.augment.augmentation import Augmentation
from raydali.data.index.labeled import LabeledFiles
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.pipeline import Interpolation
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.pictures import assert_like_pillow, encoded, files, one_batch, oriented, photograph

Images = TrainImages | ValidationImages
Batch = tuple[torch.Tensor, NDArray[np.int64]]

TRAIN = TrainImages(image_size=96, seed=3)
VALIDATION = ValidationImages(image_size=96, resize_size=110)


def by_dali(
    pipeline: Images, source: LabeledFiles, ids: Sequence[int] | None = None, epochs: int | Sequence[int] = 0
) -> Batch:
    images, labels = one_batch(pipeline, source, ids, epochs)
    return images, labels.numpy()


def by_pillow(pipeline: Images, source: LabeledFiles, epoch: int = 0) -> Batch:
    samples = [pipeline.sample(source, id, epoch) for id in range(len(source))]
    return torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples]).numpy()


def difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.float() - other.float()).abs()


def with_alpha(image: Image.Image) -> Image.Image:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def ycck(image: Image.Image) -> bytes:
    """A CMYK JPEG whose Adobe marker says that C, M and Y are stored as luma and chroma, as Photoshop does."""
    data = bytearray(encoded(image.convert("CMYK")))
    data[data.index(b"Adobe") + 11] = 2
    return bytes(data)


SIZES = [None, (120, 160), (1000, 700), (37, 500), (96, 96), (50, 60), (110, 110)]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    names = [(name, size) for name in ("china", "flower") for size in SIZES]
    return files(
        tmp_path_factory.mktemp("photographs"), **{f"{i}": encoded(photograph(*name)) for i, name in enumerate(names)}
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("epoch", range(4))
def test_train_pixels_are_torchvisions_on_the_same_crop(
    photographs: LabeledFiles, epoch: int, interpolation: Interpolation
) -> None:
    pipeline = replace(TRAIN, interpolation=interpolation)
    images, labels = by_dali(pipeline, photographs, epochs=epoch)
    expected, expected_labels = by_pillow(pipeline, photographs, epoch=epoch)
    assert_like_pillow(images, expected, interpolation)
    np.testing.assert_array_equal(labels, expected_labels)
    np.testing.assert_array_equal(labels, range(len(photographs)))
    assert labels.dtype == np.int64


@pytest.mark.parametrize(
    ("image_size", "resize_size"), [(96, 110), (96, 96), (95, 110), (64, 73), (224, 256), (7, 300)]
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_validation_pixels_are_torchvisions(
    photographs: LabeledFiles, image_size: int, resize_size: int, interpolation: Interpolation
) -> None:
    pipeline = ValidationImages(image_size=image_size, resize_size=resize_size, interpolation=interpolation)
    images, labels = by_dali(pipeline, photographs)
    expected, _ = by_pillow(pipeline, photographs)
    assert images.shape == (len(photographs), 3, image_size, image_size)
    assert_like_pillow(images, expected, interpolation)
    np.testing.assert_array_equal(labels, range(len(photographs)))


def kinds() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Files of many kinds, each with what Pillow's convert("RGB") makes of it, as PNG."""
    china = photograph(size=(240, 160))
    made = {
        "grayscale": encoded(china.convert("L")),
        "cmyk": encoded(china.convert("CMYK")),
        "ycck": ycck(china),
        "4:4:4": encoded(china, subsampling=0),
        "4:2:2": encoded(china, subsampling=1),
        "progressive": encoded(china, progressive=True),
        "rgb_jpeg": encoded(china, keep_rgb=True),
        "png": encoded(china, "PNG"),
        "palette": encoded(china.quantize(64), "PNG"),
        "transparent_palette": encoded(china.quantize(64), "PNG", transparency=3),
        "rgba": encoded(with_alpha(china.convert("RGB")), "PNG"),
        "la": encoded(with_alpha(china.convert("L")), "PNG"),
        "grayscale_png": encoded(china.convert("L"), "PNG"),
        "two_colours": encoded(china.convert("1"), "PNG"),
        "webp": encoded(china, "WEBP"),
        "bmp": encoded(china, "BMP"),
        "tiff": encoded(china, "TIFF"),
        "ppm": encoded(china, "PPM"),
        "pgm": encoded(china.convert("L"), "PPM"),
        "one_pixel": encoded(Image.new("RGB", (1, 1), (200, 100, 50))),
        "one_column": encoded(china.resize((1, 200))),
        "one_row": encoded(china.resize((200, 1))),
        "wide": encoded(china.resize((10_000, 40))),
        "high": encoded(china.resize((40, 10_000))),
    }
    plain = {name: encoded(Image.open(io.BytesIO(data)).convert("RGB"), "PNG") for name, data in made.items()}
    deep = np.asarray(china.convert("L")).astype(np.uint16) * 257
    of_floats = Image.fromarray((deep / 65_535).astype(np.float32))
    for name, image, kind in (("", deep, "PNG"), ("_pgm", deep, "PPM"), ("_tiff", deep, "TIFF")):
        made[f"sixteen_bits{name}"] = encoded(Image.fromarray(image), kind)
        plain[f"sixteen_bits{name}"] = plain["grayscale_png"]
    made["floats"], plain["floats"] = encoded(of_floats, "TIFF"), plain["grayscale_png"]
    return made, plain


@pytest.mark.parametrize("pipeline", [TRAIN, VALIDATION])
def test_every_kind_of_file_decodes_to_pillows_pixels(tmp_path: Path, pipeline: Images) -> None:
    made, plain = (files(tmp_path / name, **data) for name, data in zip(("made", "plain"), kinds(), strict=True))
    for by in (by_dali, by_pillow):
        most = difference(by(pipeline, made)[0], by(pipeline, plain)[0]).amax((1, 2, 3))
        wrong = [Path(made.path(id)).stem for id in range(len(made)) if most[id] > 0]
        assert not wrong, by.__name__
    assert_like_pillow(by_dali(pipeline, made)[0], by_pillow(pipeline, made)[0])


UPRIGHT: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels.swapaxes(0, 1), 2),
    8: lambda pixels: np.rot90(pixels),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("pipeline", [TRAIN, VALIDATION])
def test_exif_orientation_is_applied(tmp_path: Path, pipeline: Images, kind: str) -> None:
    rotated: dict[str, bytes] = {}
    upright: dict[str, bytes] = {}
    for orientation, turn in UPRIGHT.items():
        data = encoded(photograph(size=(240, 160)), kind, exif=oriented(orientation))
        rotated[str(orientation)] = data
        upright[str(orientation)] = encoded(Image.fromarray(turn(np.asarray(Image.open(io.BytesIO(data))))), "PNG")
    source, expected = files(tmp_path / "rotated", **rotated), files(tmp_path / "upright", **upright)
    for by in (by_dali, by_pillow):
        assert torch.equal(by(pipeline, source)[0], by(pipeline, expected)[0])


def test_pixels_depend_on_seed_epoch_and_id_alone(photographs: LabeledFiles) -> None:
    together, _ = by_dali(TRAIN, photographs, ids=[4, 0, 1, 0], epochs=[2, 2, 2, 3])
    alone, _ = by_dali(TRAIN, photographs, ids=[0], epochs=[2])
    assert torch.equal(together[1], alone[0])
    assert difference(together[1], together[3]).mean() > 5
    other_seed, _ = by_dali(TrainImages(image_size=96, seed=4), photographs, ids=[0], epochs=[2])
    assert difference(other_seed, alone).mean() > 5


def test_validation_knows_no_epoch(photographs: LabeledFiles) -> None:
    first, _ = by_dali(VALIDATION, photographs, epochs=0)
    later, _ = by_dali(VALIDATION, photographs, epochs=7)
    assert torch.equal(first, later)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_come_as_often_as_asked(photographs: LabeledFiles, probability: float) -> None:
    pipeline = TrainImages(image_size=8, seed=0, flip_probability=probability)
    ids = np.arange(len(photographs)).repeat(300)
    _, flips = pipeline.draws(ids, np.arange(len(ids)) % 300)
    assert np.mean(flips) == pytest.approx(probability, abs=0.03 if probability == 0.3 else 0)


def test_a_flip_mirrors_the_image(photographs: LabeledFiles) -> None:
    whole = TrainImages(image_size=96, seed=0, random_area=(1.0, 1.0), random_aspect=(0.1, 10.0))
    for by in (by_dali, by_pillow):
        plain, _ = by(replace(whole, flip_probability=0.0), photographs)
        flipped, _ = by(replace(whole, flip_probability=1.0), photographs)
        assert torch.equal(flipped, plain.flip(3))
        assert difference(flipped, plain).mean() > 5


def test_images_are_augmented_by_their_plans(photographs: LabeledFiles) -> None:
    augmented = replace(TRAIN, augmentation=Augmentation("trivial", erase=0.5))
    ids = np.arange(len(photographs))
    images, labels = by_dali(augmented, photographs, epochs=1)
    plain, _ = by_dali(TRAIN, photographs, epochs=1)
    (plans,) = augmented.plans(ids, np.ones_like(ids))
    np.testing.assert_array_equal(labels, ids)
    assert torch.equal(images, augmented.augmentation.apply(plain, torch.tensor(plans)))
    assert not torch.equal(images, plain)


def test_pipelines_travel_to_workers() -> None:
    for pipeline in (TRAIN, VALIDATION, replace(TRAIN, augmentation=Augmentation("augmix"))):
        assert pickle.loads(pickle.dumps(pipeline)) == pipeline
        assert pipeline.outputs[:2] == ("images", "labels")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"image_size": 0}, "image_size"),
        ({"hw_decoder_load": 65}, "hw_decoder_load"),
        ({"largest_image": (-1, 0)}, "largest_image"),
        ({"seed": -1}, "seed"),
        ({"random_area": (0.0, 1.0)}, "random_area"),
        ({"random_area": (1.0, 0.5)}, "random_area"),
        ({"random_area": (1.1, 1.5)}, "random_area"),
        ({"random_aspect": (0.0, 1.0)}, "random_aspect"),
        ({"random_aspect": (2.0, 1.0)}, "random_aspect"),
        ({"random_aspect": (1.0, float("inf"))}, "random_aspect"),
        ({"flip_probability": 1.1}, "flip_probability"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        TrainImages(**{"image_size": 96, "seed": 0} | settings)


def test_a_centre_crop_that_would_need_padding_is_refused() -> None:
    with pytest.raises(UsageError, match=mentioning("resize_size 200 image_size 224 256")):
        ValidationImages(image_size=224, resize_size=200)
