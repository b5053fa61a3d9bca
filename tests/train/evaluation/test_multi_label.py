"""Several labels per image: each image counts once, and the mean average precision is that of all images together."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MultilabelAccuracy, MultilabelAveragePrecision

from raydali.data.loading.loader import Batch
from raydali.data.stream.stream import OrderedPass
from raydali.errors import DataError
from raydali.train.evaluation.classification import evaluate_labels
from raydali.train.step import Precision
from raydali.train.worker import Worker
from tests.support.ranks import run_ranks

N, LABELS = 41, 5


def scores_and_labels(labels: int = LABELS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(N, labels, generator=generator).round(decimals=1)  # some are equal
    targets = (torch.rand(N, labels, generator=generator) < 0.3).to(torch.uint8)
    targets[:, -1] = 0  # a label that no image has
    return scores, targets


def validate(labels: int = LABELS, samples: int = N) -> dict[str, float]:
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")

    def batches() -> Iterator[Batch]:
        for micro_batch in OrderedPass(samples=N, batch_size=8).micro_batches(worker.rank, worker.world_size):
            scores, targets = scores_and_labels(labels)
            if samples:
                yield Batch({"images": scores[micro_batch.ids], "labels": targets[micro_batch.ids]}, micro_batch)

    return evaluate_labels(nn.Identity(), batches(), worker, Precision("fp32", worker.device))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_results_are_those_of_all_images_together(world_size: int) -> None:
    scores, targets = scores_and_labels()
    metric = MultilabelAveragePrecision(LABELS - 1, average="macro")
    precision = metric(scores[:, :-1].sigmoid(), targets[:, :-1].long()).item()
    accuracy = MultilabelAccuracy(LABELS, average="micro")(scores.sigmoid(), targets.long()).item()
    results = run_ranks(world_size, validate)
    assert all(result["images"] == N for result in results)
    for result in results:
        assert result["map"] == pytest.approx(precision, rel=1e-6)
        assert result["accuracy"] == pytest.approx(accuracy, rel=1e-6)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, targets.float())
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_labels_that_nothing_has() -> None:
    ((result),) = run_ranks(1, validate, 1)
    assert result["map"] == 0 and np.isfinite(result["loss"])


def test_no_image() -> None:
    with pytest.raises(DataError):
        validate(samples=0)
