"""Draws the micro-batches of a step as the network got them, for `raydali replay`: boxes and masks are drawn in."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydali.commands.preview import class_names
from raydali.text import number

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_NOT_FINITE = 255, 0, 255
"""The colour of pixels that are infinite or NaN."""


def rank_of_loss(loss: float | None) -> float:
    """Return the key by which the worst loss is the first: one that is not finite before the largest one."""
    return 0.0 if loss is None else -loss if math.isfinite(loss) else -math.inf


def replay_sheet(
    title: str, facts: Sequence[str], micro_batches: Sequence[Mapping[str, Any]], classes: Sequence[str], most: int
) -> bytes | None:
    """Draw those pictures of each micro-batch that have the largest losses, as a PNG; return None if there are none."""
    from raydali.report.contact_sheet import Picture, Row, Sheet, as_png

    rows = []
    for batch in micro_batches:
        if not batch["inputs"] or getattr(batch["inputs"][0], "ndim", 0) not in (4, 5):
            return None
        samples, tensors = batch["samples"], batch["tensors"]
        labels = class_names(classes, None if "boxes" in tensors else tensors.get("labels"), len(samples))
        worst = sorted(range(len(samples)), key=lambda place: rank_of_loss(samples[place]["loss"]))[:most]
        pictures = []
        for place in worst:
            lines = f"id {samples[place]['id']}", f"loss {number(samples[place]['loss'], '.4g')}"
            pictures.append(Picture(_drawn(batch, place), labels[place], lines, samples[place]["path"]))
        rows.append(Row(f"batch {batch['micro_batch']}", f"loss {batch['loss']:.4g}", pictures))
    return as_png(Sheet(title, facts, rows))


def _drawn(row: Mapping[str, Any], place: int) -> "NDArray[Any]":
    """Return the picture of a sample with its boxes, and beside it what else of its inputs has its size."""
    import numpy as np
    from PIL import Image, ImageDraw

    from raydali.data.tasks.detection import PADDING

    panels = [_pixels(each[place]) for each in row["inputs"] if getattr(each, "ndim", 0) > 2]
    image = Image.fromarray(panels[0])
    boxes, labels = (row["tensors"].get(name) for name in ("boxes", "labels"))
    if boxes is not None and labels is not None and labels.ndim == 2:
        for left, top, right, bottom in boxes[place][labels[place] != PADDING].tolist():
            if all(map(math.isfinite, (left, top, right, bottom))):
                ImageDraw.Draw(image).rectangle((left, top, max(left, right), max(top, bottom)), outline="#00ff00")
    size = panels[0].shape
    return np.concatenate([np.asarray(image), *(panel for panel in panels[1:] if panel.shape == size)], 1)


def _pixels(tensor: "torch.Tensor") -> "NDArray[Any]":
    """Return an image (C, H, W), the middle one of a clip (C, T, H, W), or a mask (1, H, W) or (H, W), as 8-bit RGB.

    Floats that are neither 8-bit levels nor classes are stretched to black and white; what is not finite is magenta.
    """
    import numpy as np

    from raydali.inference.task_results.segmentation import colour_of

    values = (tensor[:, tensor.shape[1] // 2] if tensor.ndim == 4 else tensor).double().cpu().numpy()
    values = values[:3] if values.ndim == 3 and len(values) > 2 else values.reshape(-1, *values.shape[-2:])[:1]
    finite = np.isfinite(values)
    low, high = values.min(initial=math.inf, where=finite), values.max(initial=-math.inf, where=finite)
    is_stretched = finite.any() and (low < 0 or (high <= 1 and (values % 1)[finite].any()))
    if is_stretched:
        values = (values - low) / ((high - low) or 1.0) * 255
    pixels = np.where(finite, values, 0).round().clip(0, 255).astype(np.uint8)
    is_mask = len(pixels) == 1 and not is_stretched
    image = colour_of(pixels[0]) if is_mask else np.repeat(np.moveaxis(pixels, 0, -1), 3 // len(pixels), 2)
    image[~finite.all(0)] = _NOT_FINITE
    return image
