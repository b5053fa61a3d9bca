"""Validation of classifiers of images, with one or several labels per image.

Each sample counts once, for any number of workers: ranks may have different numbers of batches, or none, and
communicate only at the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from raydali.data.load.loader import Batch
from raydali.training.evaluation.validation import evaluating, gather_arrays, require_read
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision, *, inputs: str = "images"
) -> dict[str, float]:
    """Compute "loss" (cross-entropy), "top1" and "top5" of the unwrapped model over batches of `inputs` and "labels".

    The figures are means over all "images"; five classes have no top5.
    """
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
    metrics = {"images": int(images), "loss": loss_sum / images, "top1": top1 / images}
    return metrics | ({"top5": top5 / images} if has_top5 else {})


@torch.inference_mode()
def evaluate_labels(
    model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision
) -> dict[str, float]:
    """Compute "loss", "map" and "accuracy" of the unwrapped model over batches of "images" and "labels" (N, C).

    Labels are 0 or 1. The loss is the mean binary cross-entropy, and accuracy the share of correct labels at a
    threshold of 0.5. The average precision of a label is torchmetrics' MultilabelAveragePrecision over all images, not
    a mean over batches or ranks; a label that no image has does not count.
    """
    logits, labels, ids = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    with evaluating(model):
        for batch in batches:
            with precision.autocast():
                of_batch = model(batch["images"])
            logits.append(of_batch.float().cpu())
            labels.append(batch["labels"].cpu())
            ids += batch.ids.tolist()
    mine = dict[str, NDArray[Any]]()
    if ids:
        mine = {"ids": np.array(ids), "logits": torch.cat(logits).numpy(), "labels": torch.cat(labels).numpy()}
    of_ranks = [arrays for arrays in gather_arrays(worker, mine) if arrays]
    images, loss, map_, accuracy = worker.from_first(_label_metrics(of_ranks) if of_ranks else (0, 0.0, 0.0, 0.0))
    require_read(images, batches)
    return {"images": int(images), "loss": loss, "map": map_, "accuracy": accuracy}


def _label_metrics(of_ranks: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[float, float, float, float]:
    """The number of images, loss, mAP and accuracy of all ranks' images, in the order of their ids."""
    from torchmetrics.functional.classification import binary_average_precision

    order = np.argsort(np.concatenate([arrays["ids"] for arrays in of_ranks]))
    logits, labels = (
        torch.from_numpy(np.concatenate([arrays[name] for arrays in of_ranks])[order]) for name in ("logits", "labels")
    )
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    correct = ((logits > 0) == (labels == 1)).double().mean()
    precisions = [
        binary_average_precision(scores, truth).item()
        for scores, truth in zip(logits.sigmoid().T, labels.long().T, strict=True)
        if truth.any()
    ]
    return len(labels), loss.item(), float(np.mean(precisions)) if precisions else 0.0, correct.item()
