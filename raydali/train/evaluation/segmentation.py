"""Validation of a segmentation network on each image exactly once, for any number of workers."""

import torch
from torch import nn

from raydali.train.evaluation.validation_pass import ValidationPass, evaluating, require_read


@torch.inference_mode()
def evaluate(model: nn.Module, val: ValidationPass, classes: int) -> dict[str, float]:
    """Compute from one confusion matrix: "iou", the mean over the classes that occur, and "accuracy" of pixels.

    Args:
        model: maps "images" (N, 3, H, W) to scores (N, classes, H, W).
        val: its batches also have "masks" (N, 1, H, W), in which values from `classes` on do not count.
        classes: their number.
    """
    counts = torch.zeros(1 + classes**2, dtype=torch.int64)  # of images, and of pixels by true and predicted class
    with evaluating(model):
        for batch in val.batches:
            with val.precision.autocast():
                predicted = model(batch["images"]).argmax(1)
            masks = batch["masks"].squeeze(1).long()
            known = masks < classes
            pixels = torch.bincount(masks[known] * classes + predicted[known], minlength=classes**2)
            counts += torch.cat([pixels.new_tensor([len(masks)]), pixels]).cpu()
    images, *of_pairs = val.worker.sum(counts).tolist()
    require_read(images, val.batches)
    confusion = torch.tensor(of_pairs, dtype=torch.float64).reshape(classes, classes)
    right, union = confusion.diag(), confusion.sum(0) + confusion.sum(1) - confusion.diag()
    iou = (right / union)[union > 0].mean().item()
    return {"images": images, "iou": iou, "accuracy": (right.sum() / confusion.sum()).item()}
