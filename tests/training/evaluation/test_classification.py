"""Validation counts each image once: N = 161 on 2 and 5 workers."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MultilabelAccuracy, MultilabelAveragePrecision

from raydali.data.broken.quarantine import Quarantine
from raydali.data.load.loader import Batch
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import ValidationImages
from raydali.errors import DataError
from raydali.training.evaluation import detection, restoration
from raydali.training.evaluation.classification import evaluate, evaluate_labels
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker
from tests.support.broken import folder
from tests.support.messages import mentioning
from tests.support.quick import first_quick
from tests.support.ranks import run_ranks

N, CLASSES = 161, 7


def images_and_labels(ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(N, 3, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (N,), generator=generator)
    return images[ids], labels[ids]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES))


def validate() -> tuple[dict[str, float], bool]:
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")

    def batches() -> Iterator[Batch]:
        for micro_batch in OrderedPass(samples=N, batch_size=16).micro_batches(worker.rank, worker.world_size):
            images, labels = images_and_labels(micro_batch.ids)
            yield Batch({"images": images, "labels": labels}, micro_batch)

    model = network()
    result = evaluate(model, batches(), worker, Precision("fp32", worker.device))
    return result, model.training


@pytest.mark.parametrize("world_size", [2, 5])
def test_results_are_those_of_one_pass_over_all_images(world_size: int) -> None:
    images, labels = images_and_labels(np.arange(N))
    with torch.no_grad():
        logits = network().eval()(images)
    best = logits.topk(5).indices == labels[:, None]
    for result, still_training in run_ranks(world_size, validate):
        assert still_training
        assert result["images"] == N
        assert result["top1"] == best[:, 0].sum().item() / N
        assert result["top5"] == best.sum().item() / N
        assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


@pytest.mark.parametrize(
    "evaluation",
    [evaluate, restoration.evaluate, partial(detection.evaluate, source=None)],  # type: ignore[arg-type]  # not reached
)
def test_a_model_stays_in_training_mode_after_a_failed_batch(evaluation: Callable[..., object]) -> None:
    def broken() -> Iterator[Batch]:
        yield from ()
        raise DataError("gone")

    model, worker = network(), Worker.join(torch.device("cpu"), cpus=1, node="local")
    with pytest.raises(DataError, match="gone"):
        evaluation(model, broken(), worker=worker, precision=Precision("fp32", worker.device))
    assert model.training and model[1].training


def test_without_one_sound_image_the_first_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path, 6, dict.fromkeys(range(6), "text"))
    order, worker = OrderedPass(samples=6, batch_size=4), Worker.join(torch.device("cpu"), cpus=1, node="local")
    pipeline = ValidationImages(image_size=16, resize_size=16)
    with (
        make_loader("torch", source, pipeline, order, quarantine=lambda _: Quarantine(6)) as loader,
        pytest.raises(DataError, match=mentioning(f"{source.path(0)} verify")),
    ):
        evaluate(network(), loader, worker, Precision("fp32", worker.device))


def of_five_classes() -> dict[str, float]:
    """One batch, which only one rank has."""
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")
    batches: list[Batch] = []
    for micro_batch in OrderedPass(samples=8, batch_size=8).micro_batches(worker.rank, worker.world_size):
        images, labels = images_and_labels(micro_batch.ids)
        batches.append(Batch({"images": images, "labels": labels % 5}, micro_batch))
    return evaluate(nn.Sequential(network(), nn.Linear(CLASSES, 5)), batches, worker, Precision("fp32", worker.device))


def test_five_classes_have_no_top5() -> None:
    for result in run_ranks(2, of_five_classes):
        assert result.keys() == {"images", "loss", "top1"} and result["images"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# Several labels: the mean average precision is that of all images together

SAMPLES, LABELS = 41, 5


def scores_and_labels(labels: int = LABELS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(SAMPLES, labels, generator=generator).round(decimals=1)  # some are equal
    targets = (torch.rand(SAMPLES, labels, generator=generator) < 0.3).to(torch.uint8)
    targets[:, -1] = 0  # a label that no image has
    return scores, targets


def validate_labels(labels: int = LABELS, samples: int = SAMPLES) -> dict[str, float]:
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")

    def batches() -> Iterator[Batch]:
        for micro_batch in OrderedPass(samples=SAMPLES, batch_size=8).micro_batches(worker.rank, worker.world_size):
            scores, targets = scores_and_labels(labels)
            if samples:
                yield Batch({"images": scores[micro_batch.ids], "labels": targets[micro_batch.ids]}, micro_batch)

    return evaluate_labels(nn.Identity(), batches(), worker, Precision("fp32", worker.device))


@first_quick("world_size", [7, 2])
def test_results_are_those_of_all_images_together(world_size: int) -> None:
    scores, targets = scores_and_labels()
    metric = MultilabelAveragePrecision(LABELS - 1, average="macro")
    precision = metric(scores[:, :-1].sigmoid(), targets[:, :-1].long()).item()
    accuracy = MultilabelAccuracy(LABELS, average="micro")(scores.sigmoid(), targets.long()).item()
    results = run_ranks(world_size, validate_labels)
    assert all(result["images"] == SAMPLES for result in results)
    for result in results:
        assert result["map"] == pytest.approx(precision, rel=1e-6)
        assert result["accuracy"] == pytest.approx(accuracy, rel=1e-6)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, targets.float())
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_labels_that_nothing_has() -> None:
    ((result),) = run_ranks(1, validate_labels, 1)
    assert result["map"] == 0 and np.isfinite(result["loss"])


def test_no_image() -> None:
    with pytest.raises(DataError):
        validate_labels(samples=0)
