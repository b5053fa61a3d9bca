"""Semantic segmentation: its loss, and its evaluation by one confusion matrix."""

import io
from collections.abc import Mapping, Sequence
from posixpath import splitext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from raydali.data.index.masked_images import IGNORED, MaskedImages
from raydali.training.evaluation.validation import ValidationPass, evaluating, require_read
from raydali.training.worker import Worker


def segmentation_loss(
    scores: Sequence[torch.Tensor],
    masks: torch.Tensor,
    weights: torch.Tensor | None,
    auxiliary: float,
    *,
    dice: bool = False,
) -> torch.Tensor:
    """Return the mean cross-entropy over the pixels that count, and of the auxiliary head as a share.

    Args:
        scores: (N, classes, H, W) each, the main ones first.
        masks: (N, 1, H, W); IGNORED where pixels do not count.
        weights: of the classes in the cross-entropy, (classes,); None: all 1.
        auxiliary: the weight of the further scores.
        dice: whether to add `dice_loss` to the cross-entropy of each head.
    """
    truth, losses = masks.squeeze(1).long(), list[torch.Tensor]()
    for output in scores:
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        of_weights = None if weights is None else weights.to(output.dtype)
        losses.append(F.cross_entropy(output, truth, of_weights, ignore_index=IGNORED))
        if dice:
            losses[-1] = losses[-1] + dice_loss(output, truth)
    return losses[0] + auxiliary * sum(losses[1:], losses[0].new_zeros(()))


def dice_loss(scores: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the mean of 1 - D over the classes that an image has, and then over the images.

    D is the Dice coefficient of Milletari et al., "V-Net", 3DV 2016, with the softmax p and the truth g (0 or 1) of a
    class in the pixels that count: 2 sum(p g) / (sum(p^2) + sum(g)). It is of one image, not of a batch, so that the
    loss of a global batch does not depend on its cut into micro-batches. An image without such pixels costs 0.

    Args:
        scores: (N, classes, H, W).
        truth: (N, H, W); IGNORED where pixels do not count.
    """
    p = scores.softmax(1) * (truth != IGNORED)[:, None]
    g = truth[:, None] == torch.arange(scores.shape[1], device=scores.device)[:, None, None]
    size = g.sum((2, 3))
    coefficients = 2 * (p * g).sum((2, 3)) / (p.square().sum((2, 3)) + size).clamp(min=1)  # 1: of absent classes alone
    present = size > 0
    return (((1 - coefficients) * present).sum(1) / present.sum(1).clamp(min=1)).mean()


@torch.inference_mode()
def evaluate(network: nn.Module, val: ValidationPass, classes: int) -> dict[str, float]:
    """Return "images", "iou", the mean over classes that occur, "accuracy" of pixels and "loss", a mean over pixels.

    The confusion matrix is a sum of whole numbers over ranks, so that it does not depend on their number.

    Args:
        network: maps "images" (N, 3, H, W) to scores (N, classes, H, W), or of more classes, which are never right.
        val: its batches also have "masks" (N, 1, H, W).
        classes: their number.
    """
    counts = torch.zeros(1 + classes * (classes + 1), dtype=torch.int64, device=val.worker.device)
    loss = torch.zeros((), dtype=torch.float64, device=val.worker.device)
    with evaluating(network):
        for batch in val.batches:
            with val.precision.autocast():
                scores = network(batch["images"])
            truth = batch["masks"].squeeze(1).long()
            loss += F.cross_entropy(scores.float(), truth, ignore_index=IGNORED, reduction="sum")
            counts[0] += len(truth)
            counts[1:] += confusion(scores.argmax(1), truth, classes)
    images, *of_pairs = val.worker.sum(counts).tolist()
    require_read(images, val.batches)
    matrix = torch.tensor(of_pairs, dtype=torch.float64).reshape(classes, classes + 1)
    return {"images": images, **figures(matrix), "loss": (val.worker.sum(loss) / matrix.sum()).item()}


def confusion(predicted: torch.Tensor, truth: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the number of pixels by true and predicted class, int64 (classes * (classes + 1),).

    The last column has the predictions of all further classes.
    """
    counted = truth != IGNORED
    pairs = truth[counted] * (classes + 1) + predicted[counted].clamp(max=classes)
    return torch.bincount(pairs, minlength=classes * (classes + 1))


def figures(matrix: torch.Tensor) -> Mapping[str, float]:
    """Return "iou" and "accuracy" of a confusion matrix (classes, classes + 1), see `confusion`."""
    right = matrix.diag()
    union = matrix.sum(0)[:-1] + matrix.sum(1) - right
    return {"iou": (right / union)[union > 0].mean().item(), "accuracy": (right.sum() / matrix.sum()).item()}


def balanced_weights(source: MaskedImages, worker: Worker) -> torch.Tensor:
    """Return the weights of classes in inverse proportion to their pixels, float32 (classes,); 0 for those without any.

    The pixels are counted in `source.sample`. The mean weight of a pixel is 1.
    """
    pixels = torch.tensor(source.sample.pixels[: len(source.classes)], dtype=torch.float64)
    there = (pixels > 0).sum().clamp(min=1)
    weights = pixels.sum() / (there * pixels)
    return weights.where(pixels > 0, 0.0).float().to(worker.device)


def mask_files(scores: torch.Tensor, paths: Sequence[str]) -> dict[str, bytes]:
    """Return the classes of scores (N, classes, H, W) as PNG files, at the paths of their images but for the ending."""
    masks = scores.argmax(1).byte().cpu().numpy()
    return {f"{splitext(path)[0]}.png": encoded(mask, "PNG") for path, mask in zip(paths, masks, strict=True)}


def encoded(pixels: NDArray[np.uint8], form: str) -> bytes:
    """Return an image (height, width) or (height, width, 3) as a file in a format of Pillow."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()
