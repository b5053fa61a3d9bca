"""Decoding on the GPU against Pillow and torchvision: the same geometry, other JPEG arithmetic.

nvJPEG's inverse transform rounds otherwise than libjpeg's (a few of 255), and it repeats chroma where libjpeg
interpolates it, which shows in 4:2:0 files alone (simulated on these pictures: mean 0.2 to 2.6, 99th percentile 15).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from raydali.data.index.labeled import LabeledFiles
from raydali.data.tasks.classification import TrainImages, ValidationImages
from tests.support.pictures import encoded, files, one_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

Images = TrainImages | ValidationImages

TRAIN = TrainImages(image_size=96, seed=3)
VALIDATION = ValidationImages(image_size=96, resize_size=110)
BICUBIC = replace(TRAIN, interpolation="bicubic"), replace(VALIDATION, interpolation="bicubic")
EXIF_ORIENTATION = 274
SIZES = [(640, 427), (120, 160), (1000, 700), (37, 500), (96, 96), (50, 60), (2000, 1500)]


def pictures() -> list[Image.Image]:
    return [
        Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
        for pixels in load_sample_images().images
        for size in SIZES
    ]


def by_gpu(
    pipeline: Images, source: LabeledFiles, ids: Sequence[int] | None = None, epochs: int | Sequence[int] = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, H, W) in 0..255 and labels, one batch of the DALI loader on the GPU."""
    images, labels = one_batch(pipeline, source, ids, epochs, device="cuda")
    assert images.dtype == torch.uint8
    return images.float(), labels


def by_pillow(pipeline: Images, source: LabeledFiles, epoch: int = 0) -> torch.Tensor:
    return torch.stack([pipeline.sample(source, id, epoch)[0] for id in range(len(source))]).float()


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, *, mean: float, most: float, names: Iterable[object] | None = None
) -> None:
    """Each image's mean difference and the 99.9th percentile of its pixels but the outermost, in units of 1/255."""
    difference = (ours - theirs).abs()
    means = difference.mean((1, 2, 3))
    peaks = difference[:, :, 1:-1, 1:-1].flatten(1).quantile(0.999, 1)
    names = names or range(len(ours))
    wrong = {n: (float(m), float(p)) for n, m, p in zip(names, means, peaks, strict=True) if m > mean or p > most}
    assert not wrong


@pytest.mark.parametrize("load", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("settings", [TRAIN, VALIDATION, *BICUBIC])
def test_geometry_is_torchvisions(tmp_path: Path, settings: Images, load: float) -> None:
    source = files(tmp_path, **{str(i): encoded(image, subsampling=0) for i, image in enumerate(pictures())})
    pipeline = replace(settings, hw_decoder_load=load, largest_image=(1500, 2000))
    for epoch in range(3):
        images, labels = by_gpu(pipeline, source, epochs=epoch)
        assert_close(images, by_pillow(pipeline, source, epoch), mean=1.0, most=4.5)
        assert labels.dtype == torch.int64
        assert labels.tolist() == list(range(len(source)))


@pytest.mark.parametrize("pipeline", [TRAIN, VALIDATION])
def test_subsampled_chroma_differs_by_its_upsampling_alone(tmp_path: Path, pipeline: Images) -> None:
    source = files(tmp_path, **{str(i): encoded(image) for i, image in enumerate(pictures())})
    for epoch in range(3):
        images, _ = by_gpu(pipeline, source, epochs=epoch)
        assert_close(images, by_pillow(pipeline, source, epoch), mean=4.0, most=32.0)


@pytest.mark.parametrize("pipeline", [TRAIN, VALIDATION])
def test_a_batch_of_every_kind_of_file(tmp_path: Path, pipeline: Images) -> None:
    image = pictures()[0].resize((240, 160))
    ycck = bytearray(encoded(image.convert("CMYK"), subsampling=0))
    ycck[ycck.index(b"Adobe") + 11] = 2
    deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
    made = {
        "baseline": encoded(image, subsampling=0),
        "progressive": encoded(image, subsampling=0, progressive=True),
        "grayscale": encoded(image.convert("L")),
        "cmyk": encoded(image.convert("CMYK")),
        "ycck": bytes(ycck),
        "stored_rgb": encoded(image, keep_rgb=True),
        "png": encoded(image, "PNG"),
        "palette": encoded(image.quantize(64), "PNG"),
        "rgba": encoded(image.convert("RGBA"), "PNG"),
        "la": encoded(image.convert("LA"), "PNG"),
        "sixteen_bits": encoded(Image.fromarray(deep), "PNG"),
        "webp": encoded(image, "WEBP"),
        "bmp": encoded(image, "BMP"),
        "tiff": encoded(image, "TIFF"),
        "ppm": encoded(image, "PPM"),
        "one_pixel": encoded(Image.new("RGB", (1, 1), (200, 100, 50))),
        "one_column": encoded(image.resize((1, 200)), subsampling=0),
        "one_row": encoded(image.resize((200, 1)), subsampling=0),
        "wide": encoded(image.resize((10_000, 40)), subsampling=0),
    }
    source = files(tmp_path, **made)
    images, _ = by_gpu(pipeline, source)
    assert_close(images, by_pillow(pipeline, source), mean=1.0, most=4.5, names=made)


@pytest.mark.parametrize("pipeline", [TRAIN, VALIDATION])
def test_exif_orientation_is_applied(tmp_path: Path, pipeline: Images) -> None:
    image = pictures()[0].resize((240, 160))
    made: dict[str, bytes] = {}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = orientation
        made[f"jpeg{orientation}"] = encoded(image, subsampling=0, exif=exif)
        made[f"png{orientation}"] = encoded(image, "PNG", exif=exif)
    source = files(tmp_path, **made)
    images, _ = by_gpu(pipeline, source)
    assert_close(images, by_pillow(pipeline, source), mean=1.0, most=4.5, names=made)


def test_crops_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    # Which decoder takes an image (hardware or CUDA cores) does depend on the batch: their roundings differ.
    source = files(tmp_path, **{str(i): encoded(image) for i, image in enumerate(pictures())})
    together, _ = by_gpu(TRAIN, source, ids=[4, 0, 1, 0], epochs=[2, 2, 2, 3])
    alone, _ = by_gpu(TRAIN, source, ids=[0], epochs=2)
    assert_close(together[1:2], alone, mean=1.0, most=4.5)
    assert (together[1] - together[3]).abs().mean() > 5
