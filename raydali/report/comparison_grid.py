"""A grid of restored images: each row has an input, the output and the target, with their PSNR."""

import io
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from raydali.data.loading.loader import Loader
from raydali.data.stream.permutation import Permutation
from raydali.run.folder import SAMPLES, RunFolder

ROWS_SHOWN = 6
SMALLEST_SIDE = 192
"""Minimum side of a drawn picture, pixels: smaller ones are enlarged by a whole number."""
_GAP, _CAPTION = 8, 24

Pixels = NDArray[np.uint8]


class Examples:
    """Some pairs of a validation set, drawn as a network restores them.

    Args:
        folder: the run's; it gets `samples.png`.
        loader: of the pairs; broken ones are left out.
    """

    def __init__(self, folder: RunFolder, loader: Loader) -> None:
        self._folder, self._loader = folder, loader
        pairs = len(loader.source)
        self._ids = Permutation(pairs, seed=0, epoch=0)(range(min(ROWS_SHOWN, pairs))).tolist()

    def draw(self, restore: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Draw them with the outputs of `restore`, which takes and returns images (N, 3, H, W), uint8."""
        loader = self._loader
        readable = [id for id in self._ids if not loader.quarantine.examine([id])]
        if not readable:
            return
        pairs = (loader.pipeline.sample(loader.source, id, 0) for id in readable)
        inputs, targets = map(torch.stack, zip(*pairs, strict=True))
        try:
            self._folder.write(SAMPLES, draw(inputs, restore(inputs), targets))
        except OSError as error:
            self._folder.warn(f"{SAMPLES} cannot be written: {error}")


def draw(inputs: torch.Tensor, outputs: torch.Tensor, truths: torch.Tensor) -> bytes:
    """The sheet as a PNG, of images (N, 3, H, W), uint8, on any device."""
    pixels = (images.permute(0, 2, 3, 1).cpu().numpy() for images in (inputs, outputs, truths))
    rows = [_row(*triptych) for triptych in zip(*pixels, strict=True)]
    sheet = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), "white")
    for i, row in enumerate(rows):
        sheet.paste(row, (0, i * row.height))
    data = io.BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()


def _row(input: Pixels, output: Pixels, truth: Pixels) -> Image.Image:
    scale = -(-SMALLEST_SIDE // min(truth.shape[:2]))
    height, width = scale * truth.shape[0], scale * truth.shape[1]
    row = Image.new("RGB", (3 * width + 4 * _GAP, height + _CAPTION + _GAP), "white")
    canvas, font = ImageDraw.Draw(row), ImageFont.load_default(14)
    captions = f"input, {_psnr(input, truth)}", f"output, {_psnr(output, truth)}", "truth"
    for i, (pixels, caption) in enumerate(zip((input, output, truth), captions, strict=True)):
        left = _GAP + i * (width + _GAP)
        canvas.text((left, _CAPTION / 2), caption, "black", font, "lm")
        picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        row.paste(picture, (left, _CAPTION))
    return row


def _psnr(image: Pixels, truth: Pixels) -> str:
    error = ((image.astype(float) - truth) ** 2).mean()
    return f"{10 * np.log10(255**2 / error):.1f} dB" if error else "the truth itself"
