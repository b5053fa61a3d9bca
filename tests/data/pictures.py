"""Photographs in class folders, and how close to Pillow's pixels is close enough."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from raydali.data.classification import Images
from raydali.data.image_folder import ImageFolder

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (Images.mean, Images.std))


def files(folder: Path, **contents: bytes) -> ImageFolder:
    """A source of image files, in this order; the label of an id is the id."""
    for i, (name, data) in enumerate(contents.items()):
        path = folder / f"{i:03}" / f"{name}.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return ImageFolder.scan(str(folder))


def in_bytes(images: torch.Tensor) -> torch.Tensor:
    return (images * STD + MEAN) * 255


@cache
def photograph(name: str = "china", size: tuple[int, int] | None = None) -> Image.Image:
    image = Image.fromarray(load_sample_images().images[("china", "flower").index(name)])
    return image.resize(size, Image.Resampling.LANCZOS) if size else image


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **{"quality": 92} | options)
    return data.getvalue()


def assert_like_pillow(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1 of 255 for rounding (mean 0.3), now and then 2: between its two passes torch keeps fewer bits."""
    difference = (ours - theirs).abs()
    assert difference.max() < 2.01
    assert (difference > 1.01).float().mean() < 1e-3
    assert difference.mean() < 0.3
