"""Predicts and evaluates masks of images, and draws the worst images with truth and prediction side by side."""

import zlib
from posixpath import splitext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.index.masked_images import IGNORED, MaskedImages
from raydali.data.load.loader import Batch
from raydali.inference.task_results.task_results import Arrays, JobPredictions, TaskResults
from raydali.inference.worst import worst_of
from raydali.training.evaluation.segmentation import confusion, encoded

_NAMED = 3
"""Classes that are named below each of the worst images."""


class Segmentation(TaskResults):
    """Images with masks; the outputs are the confusions of each image, and its predicted mask."""

    noun = "image"
    legend = "Each: the image, its mask and the predicted one. Class 0 and what is ignored are black."
    source: MaskedImages

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "pixels" (n, 3, classes): right, true and predicted ones; "losses" (n,); "masks", compressed."""
        truth, predicted = batch["masks"].squeeze(1).long(), raw.argmax(1)
        classes = raw.shape[1]
        matrices = torch.stack([confusion(*pair, classes) for pair in zip(predicted, truth, strict=True)])
        matrices = matrices.reshape(-1, classes, classes + 1)[..., :classes]
        counted = (truth != IGNORED).sum((1, 2)).clamp(min=1)
        losses = F.cross_entropy(raw.float(), truth, ignore_index=IGNORED, reduction="none").sum((1, 2)) / counted
        parts = matrices.diagonal(dim1=1, dim2=2), matrices.sum(2), matrices.sum(1)
        masks = [zlib.compress(mask.tobytes(), 1) for mask in predicted.byte().cpu().numpy()]
        return {"pixels": torch.stack(parts, 1), "losses": losses, "masks": masks}

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compute the IoU of each class, and find the images whose mean IoU is lowest."""
        right, true, predicted = arrays["pixels"].sum(0)
        of_classes = _iou(right, true, predicted)
        rows = [
            {"class": name, "pixels": int(true[place]), "iou": None if np.isnan(iou) else float(iou)}
            for place, (name, iou) in enumerate(zip(self.classes, of_classes, strict=True))
        ]
        of_images = _iou(*arrays["pixels"].transpose(1, 0, 2))
        means = np.nanmean(of_images, 1)

        def words(place: int) -> tuple[str, str]:
            there = np.argsort(-arrays["pixels"][place, 1], kind="stable")[:_NAMED]
            names = [self.classes[index] for index in there if arrays["pixels"][place, 1, index]]
            return ", ".join(names), f"IoU {means[place]:.3f}"

        return {"metrics": {}, "classes": rows, "worst": worst_of(arrays, -means, self.source.inputs.path, words)}

    def picture(self, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return the image, its mask and the predicted one side by side."""
        pixels, truth = (tensor.permute(1, 2, 0).numpy() for tensor in self.pipeline.sample(self.source, id, 0)[:2])
        (place,) = np.flatnonzero(arrays["ids"] == id).tolist()
        predicted = np.frombuffer(zlib.decompress(arrays["masks"][place]), np.uint8).reshape(truth.shape)
        height, width = self.source.mask(id).shape
        masks = [colour_of(mask[..., 0]) * (truth != IGNORED) for mask in (truth, predicted)]
        return np.concatenate([panel[:height, :width] for panel in (pixels, *masks)], 1).astype(np.uint8)


class Overlays(JobPredictions):
    """Predicted masks, and with each its image, mixed with the colours of its classes; class 0 has none."""

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        outputs = super().outputs(raw, batch)
        images = batch[self.pipeline.outputs[0]].permute(0, 2, 3, 1).cpu().numpy()
        for (name, _), image, mask in zip([*outputs["files"]], images, raw.argmax(1).byte().cpu().numpy(), strict=True):
            mixed = np.where(mask[..., None] > 0, (image // 2 + colour_of(mask) // 2), image)
            outputs["files"].append((f"{splitext(name)[0]}.overlay.jpg", encoded(mixed, "JPEG")))
        return outputs


def colour_of(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the colours (..., 3) of classes, as Pascal VOC has them: neighbouring numbers differ much."""
    bits = np.unpackbits(mask[..., None], axis=-1, bitorder="little")  # of the class, the lowest first
    places = np.array([7, 7, 7, 6, 6, 6, 5, 5])
    colours = [sum(bits[..., bit].astype(np.int64) << places[bit] for bit in range(first, 8, 3)) for first in range(3)]
    return np.stack(colours, -1).astype(np.uint8)


def _iou(right: NDArray[np.int64], true: NDArray[np.int64], predicted: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the IoU of classes (..., classes); NaN for those that do not occur."""
    union = true + predicted - right
    with np.errstate(invalid="ignore"):
        iou: NDArray[np.float64] = np.where(union > 0, right / np.maximum(union, 1), np.nan)
    return iou
