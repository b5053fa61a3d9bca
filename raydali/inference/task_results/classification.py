"""Predicts and evaluates one class for each image or video, or several labels for each image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from raydali.data.index.labeled import LabeledSource
from raydali.data.load.loader import Batch
from raydali.data.video.clips import VideoClips
from raydali.inference.task_results.task_results import Arrays, TaskResults
from raydali.inference.worst import worst_of
from raydali.text import printable

BEST = 5
"""Predicted classes that are kept of a sample."""
CALIBRATION_BINS = 15
CONFUSIONS = 100
"""Pairs of classes that are listed, and classes up to which the whole confusion matrix is written."""
THRESHOLD = 0.5
"""Probability above which an image is said to have a label."""


class Classification(TaskResults):
    """Images with one class each; the outputs are the five most probable classes of each."""

    noun = "image"
    endings = (".csv", ".parquet")
    source: LabeledSource

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "best" (n, 5) int32, classes by falling probability, "probabilities" (n, 5), and "losses" (n,)."""
        logits = raw.float()
        best = logits.topk(min(BEST, logits.shape[1])).indices
        probabilities = logits.softmax(1).gather(1, best)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return {"best": best.int(), "probabilities": probabilities, "losses": losses}

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compute figures of each class, the confusion matrix and the calibration error."""
        return evaluate_classes(arrays, self.source, self.classes, "images")

    def table(self, arrays: Arrays) -> pa.Table:
        """Return a row for each image: path, label, probability, and the next four."""
        return pa.table({"path": _paths(self.source, arrays["ids"])} | _best_columns(arrays, self.classes))


class MultiLabel(Classification):
    """Images with several labels each; the outputs are the probabilities of all."""

    legend = "Below each: its labels, those that the model gives a probability above 0.5, and the loss."

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "probabilities" (n, C) and "losses" (n,), the mean binary cross-entropy over labels."""
        logits = raw.float()
        losses = F.binary_cross_entropy_with_logits(logits, batch["labels"].float(), reduction="none").mean(1)
        return {"probabilities": logits.sigmoid(), "losses": losses}

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compute the calibration error, and the figures of each label."""
        from torchmetrics.functional.classification import binary_average_precision

        classes, truth, probabilities = self.classes, self.source.labels[arrays["ids"]], arrays["probabilities"]
        predicted = probabilities > THRESHOLD
        rows = []
        for name, scores, of_label, right in zip(classes, probabilities.T, truth.T, predicted.T, strict=True):
            positive, both = int(of_label.sum()), int((right & (of_label == 1)).sum())
            average = None  # undefined without a positive sample
            if positive:
                average = binary_average_precision(torch.tensor(scores), torch.tensor(of_label.astype(np.int64))).item()
            ratios = {"recall": _ratio(both, positive), "precision": _ratio(both, int(right.sum()))}
            rows.append({"class": name, "images": positive, "average_precision": average, **ratios})
        error = _calibration_error(probabilities.ravel(), truth.ravel() == 1)

        def words(place: int) -> tuple[str, str]:
            return _names(classes, truth[place] == 1) or "none", _names(classes, predicted[place]) or "none"

        worst = worst_of(arrays, arrays["losses"], self.source.path, words)
        return {"metrics": {"calibration_error": error}, "classes": rows, "worst": worst}

    def table(self, arrays: Arrays) -> pa.Table:
        """Return a row for each image: path, its labels, joined by semicolons, and the probability of each label."""
        probabilities = arrays["probabilities"]
        classes = [*map(printable, self.classes)]
        labels = [_names(classes, mask, ";") for mask in probabilities > THRESHOLD]
        of_labels = {f"probability of {name}": column for name, column in zip(classes, probabilities.T, strict=True)}
        return pa.table({"path": _paths(self.source, arrays["ids"]), "labels": labels} | of_labels)


class Video(TaskResults):
    """Videos with one class each; the outputs are the probabilities of all classes for each clip.

    The probabilities of the clips of a video are averaged.
    """

    noun = "clip"
    endings = (".csv", ".parquet")
    source: VideoClips
    legend = f"The middle frames of the first clips. {TaskResults.legend}"

    def edges(self) -> NDArray[np.int64]:
        """Return the first clip of each video: the clips of a video are in one part."""
        videos = self.source.places(np.arange(len(self.source)))[0]
        first_clips: NDArray[np.int64] = np.unique(videos, return_index=True)[1]
        return first_clips

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "all" (n, C), the probabilities, and "losses" (n,)."""
        logits = raw.float()
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return {"all": logits.softmax(1), "losses": losses}

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compute the figures of `evaluate_classes` for videos, and "video_top1" and the like."""
        of_videos, videos = _by_video(arrays, self.source), self.source.videos
        result = evaluate_classes(of_videos, videos, self.classes, "videos")
        right = of_videos["best"] == videos.labels[of_videos["ids"], None]
        figures = {"top1": right[:, 0].mean(), "loss": of_videos["losses"].mean()}
        if len(self.classes) > BEST:
            figures["top5"] = right.any(1).mean()
        of_video = {f"video_{name}": float(value) for name, value in figures.items()}
        return result | {"metrics": of_video | result["metrics"]}

    def picture(self, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return the middle frame of a video's first clip."""
        clip = self.pipeline.sample(self.source, int(self.edges()[id]), 0)[0]
        frame: NDArray[np.uint8] = clip[:, clip.shape[1] // 2].permute(1, 2, 0).numpy()
        return frame

    def table(self, arrays: Arrays) -> pa.Table:
        """Return a row for each video: path, clips, label, probability, and the next four."""
        of_videos = _by_video(arrays, self.source)
        columns = {"path": _paths(self.source.videos, of_videos["ids"]), "clips": of_videos["clips"]}
        return pa.table(columns | _best_columns(of_videos, self.classes))


def evaluate_classes(arrays: Arrays, source: LabeledSource, classes: Sequence[str], noun: str) -> dict[str, Any]:
    """Compare the most probable classes of samples with their labels.

    The calibration error is the expected one (ECE) of the most probable class, over 15 bins of equal width: Guo et al.,
    "On calibration of modern neural networks", ICML 2017.

    Args:
        arrays: see `Classification.outputs`.
        source: the samples.
        classes: their names.
        noun: what samples are called.
    """
    labels, best, count = source.labels[arrays["ids"]], arrays["best"].astype(np.int64), len(classes)
    confusion = np.bincount(labels * count + best[:, 0], minlength=count**2).reshape(count, count)
    confidence = arrays["probabilities"][:, 0].clip(max=1)
    error = _calibration_error(confidence, best[:, 0] == labels)
    rows = []
    of_classes = zip(classes, confusion.diagonal(), confusion.sum(0), confusion.sum(1), strict=True)
    for name, *numbers in of_classes:
        right, predicted, support = map(int, numbers)
        ratios = {"recall": _ratio(right, support), "precision": _ratio(right, predicted)}
        rows.append({"class": name, noun: support, **ratios, "f1": _ratio(2 * right, predicted + support)})

    def words(place: int) -> tuple[str, str]:
        return classes[labels[place]], f"{classes[best[place, 0]]} {arrays['probabilities'][place, 0]:.2f}"

    metrics = {"confidence": float(confidence.mean(dtype=np.float64)), "calibration_error": error}
    worst = worst_of(arrays, arrays["losses"], source.path, words)
    return {"metrics": metrics, "classes": rows, "worst": worst} | _confusions(confusion, classes)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _confusions(confusion: NDArray[np.int64], classes: Sequence[str]) -> dict[str, Any]:
    """Return the most frequent "confusions", and of few classes the whole matrix as "confusion"."""
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    pairs = sorted(zip(*wrong.nonzero(), strict=True), key=lambda pair: (-wrong[pair], pair))[:CONFUSIONS]
    result: dict[str, Any] = {
        "confusions": [
            {"class": classes[row], "predicted": classes[column], "samples": int(wrong[row, column])}
            for row, column in pairs
        ]
    }
    if len(confusion) <= CONFUSIONS:
        result["confusion"] = confusion.tolist()
    return result


def _calibration_error(confidence: NDArray[np.float32], right: NDArray[np.bool_]) -> float:
    """Return the calibration error; as torchmetrics' binary_calibration_error, whose import takes seconds."""
    bins = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1, dtype=np.float32), confidence, side="right")
    off = np.bincount(bins, right.astype(np.float64) - confidence)
    return float(np.abs(off).sum() / len(confidence))


def _paths(source: LabeledSource, ids: NDArray[np.int64]) -> list[str]:
    return [printable(source.path(id)) for id in ids.tolist()]


def _names(classes: Sequence[str], mask: Sequence[bool], separator: str = ", ") -> str:
    return separator.join(name for name, has in zip(classes, mask, strict=True) if has)


def _best_columns(arrays: Arrays, classes: Sequence[str]) -> dict[str, Any]:
    """Return the columns of the most probable classes: label, probability, label_2, probability_2, ..."""
    names, columns = np.array([*map(printable, classes)], object), dict[str, Any]()
    for place in range(arrays["best"].shape[1]):
        ending = f"_{place + 1}" if place else ""
        columns[f"label{ending}"] = pa.array(names[arrays["best"][:, place]], pa.string())
        columns[f"probability{ending}"] = arrays["probabilities"][:, place].astype(np.float32)
    return columns


def _by_video(arrays: Arrays, source: VideoClips) -> Arrays:
    """Return the arrays of `evaluate_classes` with a row for each video, of averaged probabilities, and "clips"."""
    videos, places, clips = np.unique(source.places(arrays["ids"])[0], return_inverse=True, return_counts=True)
    mean = np.zeros((len(videos), arrays["all"].shape[1]))
    np.add.at(mean, places, arrays["all"])
    mean /= clips[:, None]
    best = np.argsort(-mean, axis=1, kind="stable")[:, :BEST]
    truth = mean[np.arange(len(videos)), source.videos.labels[videos]]
    return {
        "ids": videos,
        "clips": clips,
        "best": best,
        "probabilities": np.take_along_axis(mean, best, 1).astype(np.float32),
        "losses": -np.log(np.maximum(truth, np.finfo(np.float32).tiny)),
    }
