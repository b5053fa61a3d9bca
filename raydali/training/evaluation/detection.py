"""Validation of a detector on each image exactly once, for any number of workers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchmetrics.detection import MeanAveragePrecision

from raydali.data.index.coco import Coco
from raydali.data.load.loader import Batch
from raydali.data.tasks.detection import Boxes, unfitted
from raydali.training.evaluation.validation import evaluating, gather_arrays, require_read
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker

Found = tuple[int, Boxes, NDArray[np.float32], NDArray[np.int64]]
"""The detections in an image: its id, boxes (K, 4) in its pixels, scores (K,) and labels (K,)."""


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], source: Coco, worker: Worker, precision: Precision
) -> dict[str, float]:
    """Compute COCO's "map", and "map_50" at an IoU of 0.5, of the unwrapped model over batches of "images" and "sizes".

    All boxes of the source count. Ranks may have different numbers of batches, or none: they communicate only at the
    end, when rank 0 gathers all detections and broadcasts the metrics.
    """
    detections: list[Found] = []
    with evaluating(model):
        for batch in batches:
            images, sizes = batch["images"], batch["sizes"].cpu().numpy()
            with precision.autocast():
                results = model(images)
            detections += in_originals(batch.ids.tolist(), sizes, results, images.shape[-1])
    of_ranks = gather_arrays(worker, _packed(detections))
    of_all = sorted((one for of_rank in of_ranks for one in _unpacked(of_rank)), key=lambda one: one[0])
    coco = coco_metrics(of_all, source) if of_all else {}
    mine = (len(of_all), float(coco["map"]), float(coco["map_50"])) if coco else (0, 0.0, 0.0)
    images_seen, map_, map_50 = worker.from_first(mine)
    require_read(images_seen, batches)
    return {"images": images_seen, "map": map_, "map_50": map_50}


def in_originals(
    ids: Iterable[int], sizes: Iterable[NDArray[np.int64]], results: Iterable[dict[str, torch.Tensor]], side: int
) -> list[Found]:
    """Return the detections of a batch in pixels of the original images.

    Args:
        ids: of the images.
        sizes: height and width of each original.
        results: torchvision's "boxes", "scores" and "labels" of each image.
        side: height and width of the model's images, in pixels.
    """
    detections = []
    for id, size, result in zip(ids, sizes, results, strict=True):
        boxes, scores, labels = (result[name].cpu().numpy() for name in ("boxes", "scores", "labels"))
        detections.append((id, unfitted(boxes, size, side), scores.astype(np.float32), labels))
    return detections


def _packed(detections: Sequence[Found]) -> dict[str, NDArray[Any]]:
    """Return detections as arrays, in which the detections of all images follow each other."""
    return {
        "ids": np.array([id for id, *_ in detections], np.int64),
        "counts": np.array([len(labels) for *_, labels in detections], np.int64),
        "boxes": np.concatenate([np.zeros((0, 4), np.float32), *(boxes for _, boxes, _, _ in detections)]),
        "scores": np.concatenate([np.zeros(0, np.float32), *(scores for _, _, scores, _ in detections)]),
        "labels": np.concatenate([np.zeros(0, np.int64), *(labels for *_, labels in detections)]),
    }


def _unpacked(packed: Mapping[str, NDArray[Any]]) -> Iterator[Found]:
    of_images = (np.split(packed[name], packed["counts"].cumsum()[:-1]) for name in ("boxes", "scores", "labels"))
    yield from zip(packed["ids"].tolist(), *of_images, strict=False)


def coco_metrics(detections: Iterable[Found], source: Coco, *, of_classes: bool = False) -> dict[str, torch.Tensor]:
    """Return COCO's figures, such as "map" and "map_50", computed by faster-coco-eval over these images.

    A detection in a crowd is ignored; a detection in an image without boxes is wrong.

    Args:
        detections: (id, boxes, scores, labels) of each image.
        source: the images with their boxes.
        of_classes: whether to compute "map_per_class" as well, for the labels in "classes"; -1 without boxes.
    """
    # The caller has gathered all detections. By default, the metric would wait for the other ranks.
    # The thresholds are COCO's own; torchmetrics rounds its own, which changes mAP by about 0.0001.
    metric = MeanAveragePrecision(
        backend="faster_coco_eval",
        sync_on_compute=False,
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0, 1, 101).tolist(),
        extended_summary=of_classes,
    )
    metric.warn_on_many_detections = False
    for id, *of_found in detections:
        boxes, scores, labels = map(torch.from_numpy, of_found)
        truth = source.boxes_of(id)
        target = {
            "boxes": torch.tensor(source.boxes[truth]),
            "labels": torch.tensor(source.labels[truth]),
            "iscrowd": torch.tensor(source.crowd[truth].astype(np.int64)),
        }
        metric.update([{"boxes": boxes, "scores": scores, "labels": labels}], [target])
    result: dict[str, torch.Tensor] = metric.compute()
    if of_classes and "precision" in result:  # with `class_metrics`, each class would be evaluated again
        of_each = result["precision"][:, :, :, 0, -1].flatten(0, 1)
        defined = of_each > -1
        means = (of_each * defined).sum(0) / defined.sum(0)
        result["map_per_class"] = means.where(defined.any(0), -1)
    return result
