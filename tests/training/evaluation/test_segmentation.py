"""The figures of segmentation, against torchmetrics, and its loss."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

from raydali.data.index.masked_images import IGNORED, train_and_val
from raydali.data.load.loader import Batch
from raydali.training.evaluation.segmentation import (
    balanced_weights,
    dice_loss,
    evaluate,
    mask_files,
    segmentation_loss,
)
from raydali.training.evaluation.validation import ValidationPass
from raydali.training.forward_backward import Precision
from raydali.training.models.segmentation import WithAuxiliary, build, check_segmenter
from raydali.training.worker import Worker
from tests.support.quick import first_quick

CLASSES = 5
CPU = torch.device("cpu")
WORKER = Worker(rank=0, world_size=1, device=CPU, cpus=1, node="here")


def batches(seed: int, count: int = 3) -> list[Batch]:
    micro_batch: Any = None
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        masks = torch.randint(CLASSES - 1, (4, 1, 20, 30), generator=draw, dtype=torch.uint8)
        masks[torch.rand(masks.shape, generator=draw) < 0.2] = IGNORED
        images = torch.rand((4, CLASSES, 20, 30), generator=draw)
        found.append(Batch({"images": images, "masks": masks}, micro_batch))
    return found


def test_figures_are_those_of_torchmetrics() -> None:
    made = batches(0)
    val: Any = ValidationPass(made, None, WORKER, Precision("fp32", CPU))
    found = evaluate(nn.Identity(), val, CLASSES)
    scores, truth = (torch.cat([batch[name] for batch in made]) for name in ("images", "masks"))
    wanted: dict[str, Any] = {"num_classes": CLASSES, "ignore_index": IGNORED}
    flat = truth.squeeze(1).long()
    iou = multiclass_jaccard_index(scores, flat, average="none", **wanted)
    assert found["images"] == 12
    # A class that is neither true nor predicted does not count; torchmetrics gives it 0.
    occurs = torch.tensor(
        [bool(((scores.argmax(1) == c) | (flat == c))[flat != IGNORED].any()) for c in range(CLASSES)]
    )
    assert found["iou"] == pytest.approx(iou[occurs].mean().item(), abs=1e-6)
    assert found["accuracy"] == pytest.approx(multiclass_accuracy(scores, flat, average="micro", **wanted).item())
    assert found["loss"] == pytest.approx(F.cross_entropy(scores, flat, ignore_index=IGNORED).item(), abs=1e-5)


def test_predictions_of_further_classes_are_wrong() -> None:
    """Pixels of the classes 0, 0, 1, 1, for which a network of three classes says 0, 2, 1, 2."""
    micro_batch: Any = None
    said = F.one_hot(torch.tensor([[[0, 2, 1, 2]]]), 3).permute(0, 3, 1, 2).float()
    batch = Batch({"images": said, "masks": torch.tensor([[[[0, 0, 1, 1]]]], dtype=torch.uint8)}, micro_batch)
    val: Any = ValidationPass([batch], None, WORKER, Precision("fp32", CPU))
    found = evaluate(nn.Identity(), val, 2)
    assert (found["iou"], found["accuracy"]) == (0.5, 0.5)


def test_the_loss_has_the_auxiliary_head_and_the_weights_of_classes() -> None:
    (batch,) = batches(2, 1)
    scores, other = batch["images"], batch["images"].flip(1)
    truth, weights = batch["masks"].squeeze(1).long(), torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0])
    main, aux = (F.cross_entropy(each, truth, weights, ignore_index=IGNORED) for each in (scores, other))
    assert segmentation_loss([scores], batch["masks"], weights, 0.5) == pytest.approx(main)
    assert segmentation_loss([scores, other], batch["masks"], weights, 0.5).item() == pytest.approx(
        (main + aux / 2).item()
    )


def reference_dice(scores: torch.Tensor, truth: torch.Tensor) -> float:
    """By loops over images and classes, in float64."""
    of_images = []
    for image, mask in zip(scores.detach().softmax(1).numpy(), truth.numpy(), strict=True):
        costs, counted = [], mask != IGNORED
        for c in set(mask[counted].tolist()):
            p, g = image[c][counted], mask[counted] == c
            costs.append(1 - 2 * (p * g).sum() / ((p**2).sum() + (g**2).sum()))
        of_images.append(np.mean(costs) if costs else 0.0)
    return float(np.mean(of_images))


def test_a_dice_loss_is_of_each_images_classes_and_leaves_out_what_does_not_count() -> None:
    draw = torch.Generator().manual_seed(3)
    scores = torch.randn((4, CLASSES, 6, 5), generator=draw, dtype=torch.float64, requires_grad=True)
    masks = torch.randint(CLASSES - 1, (4, 1, 6, 5), generator=draw, dtype=torch.uint8)
    masks[0][masks[0] == 1], masks[1, 0, :3], masks[2] = 0, IGNORED, IGNORED
    truth = masks.squeeze(1).long()
    found = dice_loss(scores, truth)
    assert found.item() == pytest.approx(reference_dice(scores, truth), rel=1e-12)
    assert torch.autograd.gradcheck(lambda given: dice_loss(given, truth), scores)
    (gradient,) = torch.autograd.grad(found, scores)
    assert not gradient[1, :, :3].any() and not gradient[2].any() and gradient[1, :, 3:].all()
    halves = [dice_loss(part, mask).item() for part, mask in zip(scores.split(2), truth.split(2), strict=True)]
    assert np.mean(halves) == pytest.approx(found.item(), rel=1e-12)
    whole = segmentation_loss([scores, scores.flip(1)], masks, None, 0.5, dice=True).item()
    entropy = segmentation_loss([scores, scores.flip(1)], masks, None, 0.5).item()
    both = found.item() + reference_dice(scores.flip(1), truth) / 2
    assert whole - entropy == pytest.approx(both, rel=1e-12)


def test_balanced_weights_give_each_class_the_same_part(tmp_path: Path) -> None:
    """Four masks of four classes, of which the last one has no pixel."""
    masks = [np.zeros((10, 10), np.uint8) for _ in range(4)]
    masks[0][:, :5], masks[1][:2], masks[2][0, 0] = 1, IGNORED, 2
    for i, mask in enumerate(masks):
        for kind in ("images", "masks"):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.fromarray(mask).save(tmp_path / kind / f"{i}.png")
    source, _ = train_and_val(str(tmp_path), str(tmp_path), classes="4")
    weights = balanced_weights(source, WORKER)
    pixels = torch.tensor([400 - 50 - 20 - 1, 50, 1, 0], dtype=torch.float32)
    parts = weights * pixels
    assert parts[:3].tolist() == pytest.approx([380 / 3] * 3) and weights[3] == 0


def test_predicted_masks_are_png_files_of_classes() -> None:
    scores = F.one_hot(torch.tensor([[[0, 3], [254, 1]]]), 255).permute(0, 3, 1, 2).float()
    (name, content), *others = mask_files(scores, ["below/a.jpg"]).items()
    assert (name, others) == ("below/a.png", [])
    assert np.asarray(Image.open(io.BytesIO(content))).tolist() == [[0, 3], [254, 1]]


@first_quick("name", ["tiny", "lraspp_mobilenet_v3_large", "fcn_resnet50", "torch.nn:Identity"])
def test_models_by_name(name: str) -> None:
    if name == "torch.nn:Identity":
        check_segmenter(name)
        return
    check_segmenter(name)
    model = WithAuxiliary(build(name, 3))
    images = torch.rand(2, 3, 64, 96)
    training = model.train()(images)
    assert [tuple(each.shape) for each in training] == [(2, 3, 64, 96)] * (2 if name.startswith("fcn") else 1)
    with torch.inference_mode():
        assert model.eval()(images).shape == (2, 3, 64, 96)
