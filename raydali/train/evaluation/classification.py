"""Validation of a classifier on each image exactly once, for any number of workers."""

import time
from collections.abc import Iterable
from typing import NotRequired, TypedDict

import torch
from torch import nn
from torch.nn import functional as F

from raydali.data.loading.loader import Batch
from raydali.train.evaluation.validation_pass import evaluating, require_read
from raydali.train.step import Precision
from raydali.train.worker import Worker


class Validation(TypedDict):
    """The metrics: means over all images of all ranks; top1 and top5 are in 0..1. Five classes have no top5."""

    images: int
    loss: float
    top1: float
    top5: NotRequired[float]
    seconds: float


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision, *, inputs: str = "images"
) -> Validation:
    """Compute cross-entropy, top-1 and top-5 of the unwrapped model over batches of `inputs` and "labels".

    Ranks may have different numbers of batches, or none: they communicate only at the end, to add up sums.
    """
    began = time.perf_counter()
    sums = torch.zeros(5, dtype=torch.float64, device=worker.device)
    with evaluating(model):
        for batch in batches:
            labels = batch["labels"]
            with precision.autocast():
                logits = model(batch[inputs])
            logits = logits.float()
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            amounts = (torch.full_like(loss, amount) for amount in (len(labels), logits.shape[1] > 5))
            sums += torch.stack([*amounts, loss, best[:, 0].sum(), best.sum()])
    images, has_top5, loss_sum, top1, top5 = worker.sum(sums).tolist()
    require_read(images, batches)
    metrics: Validation = {
        "images": int(images),
        "loss": loss_sum / images,
        "top1": top1 / images,
        "top5": top5 / images,
        "seconds": time.perf_counter() - began,
    }
    if not has_top5:
        del metrics["top5"]
    return metrics
