"""The mixing of a classifier's images, and its losses: cross-entropy, or binary ones of each class or label."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Weights = Literal["balanced"] | None


def mixing(mixup: float, cutmix: float, classes: int) -> Mix:
    """Return a function that mixes 8-bit images and labels (N,) to float images and class shares (N, classes).

    Args:
        mixup: alpha of mixup (Zhang et al., ICLR 2018), 0 for off.
        cutmix: alpha of CutMix (Yun et al., ICCV 2019), 0 for off. With both off, nothing changes.
        classes: number of classes.
    """
    if not mixup and not cutmix:
        return lambda images, labels: (images, labels)
    from torchvision.transforms import v2  # takes seconds

    mixes = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    mixes += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    mix = v2.RandomChoice(mixes)
    return lambda images, labels: mix(images.float(), labels)


def balanced_weights(labels: NDArray[Any], classes: int) -> torch.Tensor:
    """Return weights (classes,) by which rare classes count as much as frequent ones.

    For labels (N,), the weight of a class with n samples is N / (C * n), where C is the number of classes with samples.
    So the mean weight of a sample is 1. A class without samples has weight 0. For labels (N, C) of 0 and 1, a label
    that n samples have has the weight (N - n) / n of its positives, as torch.nn.BCEWithLogitsLoss describes
    `pos_weight`; 1 if no sample has it.
    """
    if labels.ndim == 2:
        positives = labels.sum(0, dtype=np.int64)
        weights = np.where(positives, (len(labels) - positives) / np.maximum(positives, 1), 1)
    else:
        counts = np.bincount(labels, minlength=classes)
        weights = np.where(counts, len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1)), 0)
    return torch.tensor(weights, dtype=torch.float32)


def classification_loss(
    labels: NDArray[Any],
    classes: int,
    *,
    loss: Literal["ce", "bce", "focal", "asymmetric"] = "ce",
    bce_threshold: float | None = None,
    label_smoothing: float = 0,
    class_weights: Weights = None,
) -> nn.Module:
    """Return the loss of logits (B, C) and targets (B,) or (B, C), a mean over the micro-batch.

    Args:
        labels: all training labels, (N,), or (N, C) for several labels each.
        classes: their number, C.
        loss: "ce" for cross-entropy, "bce" for a binary cross-entropy for each class, as in "ResNet strikes back"
            (Wightman et al., 2021), which several labels have with "ce", too; "focal" for FocalLoss, or with several
            labels for FocalBinaryCrossEntropy; "asymmetric" for the latter with other numbers, for several labels.
        bce_threshold: see BinaryCrossEntropy.
        label_smoothing: share s of a target that is spread over all classes. A target t of several labels becomes
            t * (1 - s) + s / 2.
        class_weights: "balanced" for `balanced_weights`. The loss is then the sum of the samples' weighted losses
            divided by B, not by the sum of their weights, so that it is the same for mixed images.
    """
    weights = balanced_weights(labels, classes) if class_weights == "balanced" else None
    if loss == "asymmetric":
        return FocalBinaryCrossEntropy(positives=(1, 0), negatives=(1, 4), margin=0.05)
    if loss == "focal":
        return FocalBinaryCrossEntropy(positives=(0.25, 2), negatives=(0.75, 2)) if labels.ndim == 2 else FocalLoss()
    if labels.ndim == 2:
        return BinaryCrossEntropy(label_smoothing, label_smoothing / 2, weights, bce_threshold)
    if loss == "bce":
        return BinaryCrossEntropy(label_smoothing, label_smoothing / classes, None, bce_threshold)
    if weights is None:
        return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    return WeightedCrossEntropy(weights, label_smoothing=label_smoothing)


class WeightedCrossEntropy(nn.CrossEntropyLoss):
    """The sum of `-w_c * t_c * log p_c` over classes and samples, divided by the number of samples."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, C) and classes (B,), or shares of classes (B, C)."""
        logits = _at_least_single(input)
        weight = None if self.weight is None else self.weight.to(logits.dtype)
        total = F.cross_entropy(logits, target, weight, reduction="sum", label_smoothing=self.label_smoothing)
        return total / len(target)


class BinaryCrossEntropy(nn.Module):
    """The mean binary cross-entropy over all samples and classes, by a sigmoid for each.

    Args:
        label_smoothing: share of a target that is replaced.
        spread: what is added to each target in its place.
        weights: weights of the positives of each class, (C,); None for 1.
        threshold: targets above it become 1 and others 0, after smoothing, as timm's `target_threshold` has it.
    """

    weights: torch.Tensor | None

    def __init__(
        self, label_smoothing: float, spread: float, weights: torch.Tensor | None, threshold: float | None
    ) -> None:
        super().__init__()
        self._label_smoothing, self._spread, self._threshold = label_smoothing, spread, threshold
        self.register_buffer("weights", weights)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, C) and classes (B,), or targets (B, C) from 0 to 1."""
        logits = _at_least_single(logits)
        if targets.ndim == 1:
            targets = F.one_hot(targets, logits.shape[1])
        smooth = targets.to(logits.dtype) * (1 - self._label_smoothing) + self._spread
        if self._threshold is not None:
            smooth = (smooth > self._threshold).to(logits.dtype)
        weights = None if self.weights is None else self.weights.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights)


class FocalLoss(nn.Module):
    """The mean of `-(1 - p)^2 log p` over samples, where p is the softmax probability of the true class.

    Source: Lin et al., "Focal loss for dense object detection", ICCV 2017, with gamma 2, for a softmax. The loss of a
    mixed image is the mean of the losses of its classes by their shares, as mixup (Zhang et al., ICLR 2018) has it.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, C) and classes (B,), or shares of classes (B, C)."""
        logs = _at_least_single(logits).log_softmax(1)
        losses = -logs.expm1().square() * logs
        if targets.ndim == 1:
            return losses.gather(1, targets[:, None]).mean()
        return (targets.to(logs.dtype) * losses).sum(1).mean()


class FocalBinaryCrossEntropy(nn.Module):
    """The mean binary cross-entropy over all samples and classes, in which what is already right counts less.

    A positive costs `-w (1 - p)^g log p`, and a negative `-w q^g log(1 - q)` with `q = max(p - margin, 0)`. A target t
    between 0 and 1, of a mixed image, costs t of the one and 1 - t of the other.

    Sources: the focal loss of torchvision's `sigmoid_focal_loss` (Lin et al., ICCV 2017), with w = 0.25 and 0.75, and
    g = 2; and the asymmetric loss (Ridnik et al., ICCV 2021) with w = 1, g = 0 and 4 as in its authors' training,
    and a margin of 0.05. Their sum over classes is a mean here.

    Args:
        positives, negatives: the weight w and the power g of each.
        margin: probability up to which a negative costs nothing.
    """

    def __init__(self, positives: tuple[float, float], negatives: tuple[float, float], margin: float = 0.0) -> None:
        super().__init__()
        self._positives, self._negatives, self._margin = positives, negatives, margin

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, C) and targets (B, C) from 0 to 1."""
        logits = _at_least_single(logits)
        targets = targets.to(logits.dtype)
        of_positive, of_negative = F.logsigmoid(logits), F.logsigmoid(-logits)
        if self._margin:
            of_negative = (of_negative.exp() + self._margin).clamp(max=1).log()
        positive, negative = (
            -weight * (-logs.expm1()).pow(power) * logs
            for (weight, power), logs in ((self._positives, of_positive), (self._negatives, of_negative))
        )
        return torch.lerp(negative, positive, targets).mean()


def _at_least_single(logits: torch.Tensor) -> torch.Tensor:
    """Half precision has too few digits for sums over classes."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
