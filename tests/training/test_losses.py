"""The losses of classifiers: weights of classes, several labels, and the same gradients on any number of workers."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss.asymmetric_loss import AsymmetricLossMultiLabel
from timm.loss.binary_cross_entropy import BinaryCrossEntropy
from torch import nn
from torch.nn import functional as F
from torchvision.ops import sigmoid_focal_loss

from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.losses import balanced_weights, classification_loss, mixing
from raydali.training.worker import Worker
from tests.support.quick import first_quick
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
RARE = np.array([0, 0, 0, 0, 2, 2, 3, 0])
SEVERAL = np.array([[1, 0, 1], [1, 0, 0], [0, 0, 1], [1, 0, 1]], np.uint8)


def test_weights_are_n_over_c_times_n_of_the_class() -> None:
    weights = balanced_weights(RARE, 4)
    assert weights.tolist() == pytest.approx([8 / (3 * 5), 0, 8 / (3 * 2), 8 / 3])
    assert weights[RARE].mean().item() == pytest.approx(1)
    assert balanced_weights(SEVERAL, 3).tolist() == pytest.approx([1 / 3, 1, 1 / 3])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_of_classes_and_shares_agree(smoothing: float) -> None:
    logits, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.from_numpy(RARE)
    loss = classification_loss(RARE, 4, label_smoothing=smoothing, class_weights="balanced")
    shares = F.one_hot(labels, 4).float()
    assert loss(logits, labels).item() == pytest.approx(loss(logits, shares).item())
    smooth = shares * (1 - smoothing) + smoothing / 4
    expected = -(balanced_weights(RARE, 4) * smooth * logits.log_softmax(1)).sum(1).mean()
    assert loss(logits, labels).item() == pytest.approx(expected.item())
    plain = classification_loss(RARE, 4, label_smoothing=smoothing)
    assert torch.equal(plain(logits, labels), F.cross_entropy(logits, labels, label_smoothing=smoothing))


def test_a_loss_of_several_labels() -> None:
    logits, targets = torch.randn(4, 3), torch.from_numpy(SEVERAL)
    smooth = torch.where(targets == 1, 0.95, 0.05)
    assert torch.equal(
        classification_loss(SEVERAL, 3)(logits, targets), F.binary_cross_entropy_with_logits(logits, targets.float())
    )
    loss = classification_loss(SEVERAL, 3, label_smoothing=0.1, class_weights="balanced")
    weighted = F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=balanced_weights(SEVERAL, 3))
    assert loss(logits, targets).item() == pytest.approx(weighted.item())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy_is_timms(smoothing: float, threshold: float | None) -> None:
    """As timm's train.py has it with --bce-loss --bce-target-thresh: mixup smooths the targets that it mixes."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(8, 4, generator=generator), torch.from_numpy(RARE)
    ours = classification_loss(RARE, 4, loss="bce", bce_threshold=threshold, label_smoothing=smoothing)
    timms = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    torch.testing.assert_close(ours(logits, labels), timms(logits, labels))
    shares = F.one_hot(labels, 4) * 0.85 + F.one_hot(labels.flip(0), 4) * 0.15
    mixed = mixup_target(labels, 4, lam=0.85, smoothing=smoothing)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours(logits, shares), timms(logits, mixed))


def doubles(*shape: int) -> torch.Tensor:
    """Logits of which some are far from zero."""
    logits = 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits.requires_grad_()


def test_a_focal_loss_of_classes_is_the_papers_for_a_softmax() -> None:
    logits, labels, loss = doubles(8, 4), torch.from_numpy(RARE), classification_loss(RARE, 4, loss="focal")
    p = np.exp(logits.detach().numpy()) / np.exp(logits.detach().numpy()).sum(1, keepdims=True)
    of_classes = -((1 - p) ** 2) * np.log(p)
    assert loss(logits, labels).item() == pytest.approx(of_classes[np.arange(8), RARE].mean(), rel=1e-12)
    mixed = 0.7 * F.one_hot(labels, 4) + 0.3 * F.one_hot(labels.flip(0), 4)
    parts = 0.7 * of_classes[np.arange(8), RARE] + 0.3 * of_classes[np.arange(8), RARE[::-1]]
    assert loss(logits, mixed).item() == pytest.approx(parts.mean(), rel=1e-6)
    assert torch.autograd.gradcheck(lambda given: loss(given, labels), logits)
    assert torch.autograd.gradcheck(lambda given: loss(given, mixed.double()), logits)


def papers_asymmetric(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The formula of Ridnik et al. in float64; timm computes in float32."""
    p = logits.sigmoid()
    shifted = (p - 0.05).clamp(min=0)
    losses = -targets * p.log() - (1 - targets) * shifted**4 * (1 - shifted).log()
    timms = AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=0, clip=0.05, reduction="mean")(logits, targets)
    assert losses.mean().item() == pytest.approx(timms.item(), rel=1e-5)
    return losses.mean()


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("focal", lambda logits, targets: sigmoid_focal_loss(logits, targets, reduction="mean")),
        ("asymmetric", papers_asymmetric),
    ],
)
def test_focal_losses_of_several_labels_are_torchvisions_and_the_papers(name: Any, reference: Any) -> None:
    logits, targets, loss = doubles(4, 3), torch.from_numpy(SEVERAL), classification_loss(SEVERAL, 3, loss=name)
    found, wanted = loss(logits, targets), reference(logits, targets.double())
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    (gradient,), (expected,) = (torch.autograd.grad(each, logits) for each in (found, wanted))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    share = 0.3 * reference(logits, targets.double()) + 0.7 * reference(logits, 1 - targets.double())
    assert loss(logits, 0.3 * targets + 0.7 * (1 - targets)).item() == pytest.approx(share.item(), rel=1e-6)


@pytest.mark.parametrize(("name", "labels"), [("focal", RARE), ("focal", SEVERAL), ("asymmetric", SEVERAL)])
def test_focal_losses_of_certain_outputs_are_finite(name: Any, labels: Any) -> None:
    """Far beyond where float32 rounds probabilities to 0 and 1, and in half precision."""
    for dtype, far in ((torch.float32, 500.0), (torch.bfloat16, 500.0), (torch.float16, 5e4)):
        logits = (torch.arange(4 * 4).reshape(4, 4) % 3 - 1).to(dtype) * far
        logits = logits[:, : labels.shape[1]] if labels.ndim == 2 else logits
        logits.requires_grad_()
        loss = classification_loss(labels, 4, loss=name)(logits, torch.from_numpy(labels[:4]))
        assert loss.dtype == torch.float32 and loss.isfinite()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


@pytest.mark.parametrize("alphas", [(0.2, 0.0), (0.0, 1.0)])
def test_several_labels_are_mixed_as_images_are(alphas: tuple[float, float]) -> None:
    torch.manual_seed(0)
    targets = torch.from_numpy(SEVERAL)
    flat = targets[:, :1, None, None].expand(4, 3, 16, 16).contiguous() * 255
    images, mixed = mixing(*alphas, 3)(flat, targets)
    assert mixed.dtype == torch.float32 and ((mixed >= 0) & (mixed <= 1)).all() and not torch.equal(mixed, targets)
    assert (images.mean((1, 2, 3)) / 255).tolist() == pytest.approx(mixed[:, 0].tolist(), abs=1e-4)
    assert classification_loss(SEVERAL, 3, label_smoothing=0.1)(torch.zeros(4, 3), mixed).item() > 0


def micro_batch(number: int, several: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape, high = ((4, 5), 2) if several else ((4,), 5)
    return torch.randn(4, 8, generator=generator), torch.randint(0, high, shape, generator=generator)


WEIGHTED: dict[str, Any] = {"label_smoothing": 0.1, "class_weights": "balanced"}


def losses_and_gradients(several: bool, options: dict[str, Any]) -> tuple[dict[int, float], list[Any]]:
    """Train on 6 micro-batches; return the losses of this rank's, by number, and the gradients."""
    worker = Worker.join(CPU, cpus=1, node="")
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    labels = np.concatenate([micro_batch(number, several)[1].numpy() for number in range(6)])
    criterion = classification_loss(labels, 5, **options)
    step = ForwardBackward(model, lambda x, y: criterion(model(x), y), worker, Precision("fp32", CPU), micro_batches=6)
    mine = range(worker.rank, 6, worker.world_size)
    losses = {number: step(*micro_batch(number, several), last=number == mine[-1]).item() for number in mine}
    return losses, [copy.deepcopy(each.grad).tolist() for each in model.parameters() if each.grad is not None]


@first_quick(
    ("several", "options"),
    [
        (False, WEIGHTED),
        (True, WEIGHTED),
        (False, {"loss": "focal"}),
        (True, {"loss": "focal"}),
        (True, {"loss": "asymmetric"}),
    ],
    ids=str,
)
def test_any_number_of_workers_has_the_same_losses(several: bool, options: dict[str, Any]) -> None:
    ((alone, gradients),) = run_ranks(1, losses_and_gradients, several, options)
    for world_size in (2, 3):
        results = run_ranks(world_size, losses_and_gradients, several, options)
        assert {number: loss for losses, _ in results for number, loss in losses.items()} == alone
        for _, of_rank in results:
            for got, expected in zip(of_rank, gradients, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
