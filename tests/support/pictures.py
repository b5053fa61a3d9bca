"""Photographs in class folders, a batch of them by DALI, and how close to Pillow's pixels is close enough."""

import io
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image

from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.source import Source
from raydali.data.load.loader import Loader
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import Once
from raydali.data.tasks.pipeline import Pipeline


def files(folder: Path, **contents: bytes) -> LabeledFiles:
    """A source of image files, in this order; the label of an id is the id."""
    for i, (name, data) in enumerate(contents.items()):
        path = folder / f"{i:03}" / f"{name}.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return LabeledFiles.scan(str(folder))


@cache
def photograph(name: str = "china", size: tuple[int, int] | None = None) -> Image.Image:
    """One of scikit-learn's two, "china" and "flower", without its imports, which take a second."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    with Image.open(Path(package.origin).parent / f"datasets/images/{name}.jpg") as opened:
        image = opened.convert("RGB")
    return image.resize(size, Image.Resampling.LANCZOS) if size else image


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **({"quality": 92} if kind in ("JPEG", "WEBP") else {}) | options)
    return data.getvalue()


def oriented(orientation: int) -> Image.Exif:
    """What says how an image is to be turned, 1..8."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def assert_like_pillow(ours: torch.Tensor, theirs: torch.Tensor, interpolation: str = "bilinear") -> None:
    """Within 1 of 255 for rounding (mean 0.3), now and then 2: between its two passes torch keeps fewer bits.

    A bicubic filter overshoots, and what is cut off between the passes makes a few pixels differ more (6 was seen).
    """
    assert ours.dtype == theirs.dtype == torch.uint8
    difference = (ours.float() - theirs.float()).abs()
    assert difference.max() < (8.01 if interpolation == "bicubic" else 2.01)
    assert (difference > 2.01).float().mean() < 1e-4
    assert (difference > 1.01).float().mean() < 1e-3
    assert difference.mean() < 0.3


Keys = dict[tuple[int, int], tuple[torch.Tensor, ...]]
"""A sample's tensors by its id and epoch."""


def by_key(loader: Loader) -> Keys:
    """All that a loader gives, each sample once."""
    found: Keys = {}
    with loader:
        for batch in loader:
            keys = zip(batch.ids.tolist(), batch.micro_batch.epochs.tolist(), strict=True)
            for i, key in enumerate(keys):
                assert key not in found
                found[key] = tuple(batch[name][i] for name in loader.pipeline.outputs)
    return found


def one_batch(
    pipeline: Pipeline[Any],
    source: Source,
    ids: Sequence[int] | None = None,
    epochs: int | Sequence[int] = 0,
    *,
    device: str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """What the DALI loader makes of these samples, or of all, as one batch; on the host."""
    wanted = np.arange(len(source)) if ids is None else np.array(ids)
    order = Once([*zip(wanted.tolist(), np.broadcast_to(epochs, wanted.shape).tolist(), strict=True)])
    with make_loader("dali", source, pipeline, order, device=device, threads=2) as loader:
        (batch,) = loader
        assert all(tensor.device.type == device for tensor in batch.tensors.values())
        return tuple(tensor.to("cpu", copy=True) for tensor in batch.tensors.values())
