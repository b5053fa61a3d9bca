"""Images with several labels each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from raydali.data.loading.loader import Batch
from raydali.data.sources.labeled import LabeledSource
from raydali.inference.kinds.classification import CALIBRATION_BINS, Classification
from raydali.inference.kinds.kind import WORST_SHOWN, Arrays, Evaluation, Worst, text_of

THRESHOLD = 0.5


class MultiLabel(Classification):
    """Images with several labels each; the outputs are the probabilities of all."""

    legend = "Below each: its labels, those that the model gives a probability above 0.5, and the loss."

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "probabilities" (n, C) and "losses" (n,), the mean binary cross-entropy over labels."""
        logits = raw.float()
        losses = F.binary_cross_entropy_with_logits(logits, batch["labels"].float(), reduction="none").mean(1)
        return {"probabilities": logits.sigmoid(), "losses": losses}

    def evaluation(self, arrays: Arrays, source: LabeledSource, classes: Sequence[str]) -> Evaluation:
        """Compute the calibration error, and the figures of each label."""
        from torchmetrics.functional.classification import binary_average_precision, binary_calibration_error

        truth, probabilities = source.labels[arrays["ids"]], arrays["probabilities"]
        said = probabilities > THRESHOLD
        rows = list[dict[str, Any]]()
        for name, scores, of_label, right in zip(classes, probabilities.T, truth.T, said.T, strict=True):
            positive, both = int(of_label.sum()), int((right & (of_label == 1)).sum())
            average = None  # undefined without a positive sample
            if positive:
                average = binary_average_precision(torch.tensor(scores), torch.tensor(of_label.astype(np.int64))).item()
            rows.append(
                {
                    "class": name,
                    "images": positive,
                    "average_precision": average,
                    "recall": both / positive if positive else None,
                    "precision": both / int(right.sum()) if right.any() else None,
                }
            )
        flat = torch.from_numpy(probabilities.ravel().copy()), torch.from_numpy(truth.ravel().astype(np.int64))
        metrics = {
            "calibration_error": binary_calibration_error(*flat, n_bins=CALIBRATION_BINS).item(),
        }
        worst = []
        for place in np.argsort(-arrays["losses"], kind="stable")[:WORST_SHOWN].tolist():
            id = int(arrays["ids"][place])
            is_, says = (_names(classes, mask) for mask in (truth[place] == 1, said[place]))
            worst.append(Worst(id, source.path(id), is_, says, float(arrays["losses"][place])))
        return Evaluation(metrics=metrics, classes=rows, worst=worst)

    def table(self, arrays: Arrays, source: LabeledSource, classes: Sequence[str]) -> pa.Table:
        """Return a row for each image: path, its labels, joined by semicolons, and the probability of each label."""
        probabilities = arrays["probabilities"]
        columns = {
            "path": [text_of(source.path(id)) for id in arrays["ids"].tolist()],
            "labels": [_names(classes, mask, ";", "") for mask in probabilities > THRESHOLD],
        }
        of_labels = {f"probability of {name}": column for name, column in zip(classes, probabilities.T, strict=True)}
        return pa.table(columns | of_labels)


def _names(classes: Sequence[str], mask: Sequence[bool], separator: str = ", ", none: str = "none") -> str:
    return separator.join(name for name, has in zip(classes, mask, strict=True) if has) or none
