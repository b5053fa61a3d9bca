"""A grid of restored images: each row has an input, the output and the target, with their PSNR."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.load.loader import Loader
from raydali.data.stream.permutation import Permutation
from raydali.report.contact_sheet import Picture, Row, Sheet, as_png
from raydali.run.folder import SAMPLES, RunFolder

ROWS_SHOWN = 6
SMALLEST_SIDE = 192
"""Minimum side of a drawn picture, pixels: smaller ones are enlarged by a whole number."""


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
    height, width = truths.shape[2:]
    rows = []
    for i, triple in enumerate(zip(inputs, outputs, truths, strict=True), 1):
        input, output, truth = (image.permute(1, 2, 0).cpu().numpy() for image in triple)
        labels = f"input, {psnr(input, truth)}", f"output, {psnr(output, truth)}", "truth"
        pictures = [Picture(*pair, facts=(), file="") for pair in zip((input, output, truth), labels, strict=True)]
        rows.append(Row(f"sample {i}", "", pictures))
    side = -(-SMALLEST_SIDE // min(height, width)) * max(height, width)
    return as_png(Sheet("Input, output and truth", (), rows, side=side))


def psnr(image: NDArray[np.uint8], truth: NDArray[np.uint8]) -> str:
    """The peak signal-to-noise ratio of an image (height, width, 3), uint8, as a text."""
    error = ((image.astype(float) - truth) ** 2).mean()
    return f"{10 * np.log10(255**2 / error):.1f} dB" if error else "the truth itself"
