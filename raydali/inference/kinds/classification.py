"""Images with one class each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.loading.loader import Batch
from raydali.data.sources.labeled import LabeledSource
from raydali.inference.kinds.kind import WORST_SHOWN, Arrays, Columns, Evaluation, Kind, Worst, text_of
from raydali.inference.labeled_data import labeled_like, unlabeled

BEST = 5
"""Predicted classes that are kept of a sample."""
CALIBRATION_BINS = 15


class Classification(Kind):
    """Images with one class each; the outputs are the five most probable classes of each."""

    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None, given: Columns) -> LabeledSource:
        """See `Kind`."""
        return labeled_like(data, config, classes, given)

    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> LabeledSource:
        """See `Kind`."""
        return unlabeled(data, config, classes, root)

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "best" (n, 5) int32, classes by falling probability, "probabilities" (n, 5), and "losses" (n,)."""
        logits = raw.float()
        best = logits.topk(min(BEST, logits.shape[1])).indices
        probabilities = logits.softmax(1).gather(1, best)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return {"best": best.int(), "probabilities": probabilities, "losses": losses}

    def evaluation(self, arrays: Arrays, source: LabeledSource, classes: Sequence[str]) -> Evaluation:
        """Compute figures of each class, the confusion matrix and the calibration error."""
        return evaluate_classes(arrays, source.labels[arrays["ids"]], classes, source.path)

    def table(self, arrays: Arrays, source: LabeledSource, classes: Sequence[str]) -> pa.Table:
        """Return a row for each image: path, label, probability, and the next four."""
        paths = [text_of(source.path(id)) for id in arrays["ids"].tolist()]
        return pa.table({"path": paths} | best_columns(arrays, classes))


def best_columns(arrays: Arrays, classes: Sequence[str]) -> dict[str, Any]:
    """Return the columns of the most probable classes: label, probability, label_2, probability_2, ..."""
    names, columns = np.array([*classes], object), dict[str, Any]()
    for place in range(arrays["best"].shape[1]):
        ending = f"_{place + 1}" if place else ""
        columns[f"label{ending}"] = pa.array(names[arrays["best"][:, place]], pa.string())
        columns[f"probability{ending}"] = arrays["probabilities"][:, place].astype(np.float32)
    return columns


def evaluate_classes(
    arrays: Arrays,
    labels: NDArray[np.int64],
    classes: Sequence[str],
    path: Callable[[int], str],
    noun: str = "images",
) -> Evaluation:
    """Compare the most probable classes of samples with their labels.

    The calibration error is the expected one (ECE) of the most probable class, over 15 bins of equal width: Guo et al.,
    "On calibration of modern neural networks", ICML 2017.

    Args:
        arrays: see `Classification.outputs`.
        labels: int64 (n,).
        classes: their names.
        path: returns the path of a sample by its id.
        noun: what samples are called.
    """
    best, losses = arrays["best"].astype(np.int64), arrays["losses"]
    count, right = len(classes), best == labels[:, None]
    confusion = np.bincount(labels * count + best[:, 0], minlength=count**2).reshape(count, count)
    confidence = arrays["probabilities"][:, 0].clip(max=1)
    metrics = {"confidence": confidence.mean(dtype=np.float64), "calibration_error": _error(confidence, right[:, 0])}
    rows = []
    of_classes = zip(classes, confusion.diagonal(), confusion.sum(0), confusion.sum(1), strict=True)
    for name, *numbers in of_classes:
        true_positive, found, support = map(int, numbers)
        precision = true_positive / found if found else None
        recall = true_positive / support if support else None
        f1 = 2 * true_positive / (found + support) if found + support else None
        rows.append({"class": name, noun: support, "recall": recall, "precision": precision, "f1": f1})
    ids = arrays["ids"]
    worst = [
        Worst(
            id=int(ids[place]),
            path=path(int(ids[place])),
            truth=classes[labels[place]],
            predicted=f"{classes[best[place, 0]]} {arrays['probabilities'][place, 0]:.2f}",
            loss=float(losses[place]),
        )
        for place in np.argsort(-losses, kind="stable")[:WORST_SHOWN].tolist()
    ]
    return Evaluation(
        metrics={name: float(value) for name, value in metrics.items()}, classes=rows, confusion=confusion, worst=worst
    )


def _error(confidence: NDArray[np.float32], right: NDArray[np.bool_]) -> float:
    """Return the calibration error; as torchmetrics' binary_calibration_error, whose import takes seconds."""
    bins = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1, dtype=np.float32), confidence, side="right")
    off = np.bincount(bins, right.astype(np.float64) - confidence)
    return float(np.abs(off).sum() / len(confidence))
