"""Validation of a classifier with several labels per image, on each image exactly once."""

import time
from collections.abc import Iterable
from io import BytesIO
from typing import TypedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from raydali.data.loading.loader import Batch
from raydali.train.evaluation.validation_pass import evaluating, require_read
from raydali.train.step import Precision
from raydali.train.worker import Worker


class MultiLabelValidation(TypedDict):
    """The validation metrics over all images of all ranks.

    loss: the mean binary cross-entropy; map: the mean average precision of the labels, exact; accuracy: the share of
    correct labels at a threshold of 0.5. The last two are in 0..1.
    """

    images: int
    loss: float
    map: float
    accuracy: float
    seconds: float


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision) -> MultiLabelValidation:
    """Compute the metrics of the unwrapped model over batches of "images" and "labels" (N, C), which are 0 or 1.

    The average precision of a label is torchmetrics' MultilabelAveragePrecision over all images, not a mean over
    batches or ranks; a label that no image has does not count. Ranks may have different numbers of batches, or none:
    they communicate only at the end, when rank 0 gathers the scores of all images and broadcasts the metrics.
    """
    began = time.perf_counter()
    logits, labels, ids = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    with evaluating(model):
        for batch in batches:
            with precision.autocast():
                of_batch = model(batch["images"])
            logits.append(of_batch.float().cpu())
            labels.append(batch["labels"].cpu())
            ids += batch.ids.tolist()
    content = BytesIO()
    if ids:
        np.savez(content, ids=np.array(ids), logits=torch.cat(logits).numpy(), labels=torch.cat(labels).numpy())
    of_ranks = worker.gather_bytes(content.getvalue())
    mine = _metrics([each for each in of_ranks if each]) if any(of_ranks) else (0, 0.0, 0.0, 0.0)
    images, loss, map_, accuracy = worker.from_first(mine)
    require_read(images, batches)
    return {
        "images": int(images),
        "loss": loss,
        "map": map_,
        "accuracy": accuracy,
        "seconds": time.perf_counter() - began,
    }


def _metrics(of_ranks: list[bytes]) -> tuple[float, float, float, float]:
    """The number of images, loss, mAP and accuracy of all ranks' images, in the order of their ids."""
    from torchmetrics.functional.classification import binary_average_precision

    parts = []
    for content in of_ranks:
        with np.load(BytesIO(content), allow_pickle=False) as packed:
            parts.append({name: packed[name] for name in ("ids", "logits", "labels")})
    order = np.argsort(np.concatenate([part["ids"] for part in parts]))
    logits, labels = (
        torch.from_numpy(np.concatenate([part[name] for part in parts])[order]) for name in ("logits", "labels")
    )
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    correct = ((logits > 0) == (labels == 1)).double().mean()
    precisions = [
        binary_average_precision(scores, truth).item()
        for scores, truth in zip(logits.sigmoid().T, labels.long().T, strict=True)
        if truth.any()
    ]
    return len(labels), loss.item(), float(np.mean(precisions)) if precisions else 0.0, correct.item()
