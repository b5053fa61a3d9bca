"""Images that grow, on a GPU: each size has its own CUDA graph, trains as launched steps do, and frees its memory."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.imagenet import Config, train
from raydali.host.hardware import PrecisionName
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.training.forward_backward import ForwardBackward
from tests.support.digits import SHORT, few_digits
from tests.support.ranks import LocalSession, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
GPU = torch.device("cuda", 0)
GROWING = replace(
    SHORT,
    model="resnet18",
    image_size="64:128@0-2",
    resize_size=128,
    epochs=3,
    batch_size=48,
    global_batch_size=48,
    learning_rate=0.005,
    ceiling=True,
)
"""Ten steps an epoch of 64, of 96, and of 128 pixels."""


def trained(config: Config, root: Path, name: str) -> tuple[list[float], list[Any], int, list[int]]:
    """The losses of epochs, the rehearsals, the largest memory in bytes, and the sizes that were captured."""
    captured: list[int] = []
    capture = ForwardBackward._capture

    def counted(self: ForwardBackward, kind: tuple[bool, bool], *inputs: torch.Tensor) -> None:
        capture(self, kind, *inputs)
        captured.append(inputs[0].shape[-1])
        assert self.is_captured

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    session = LocalSession(folder_of(root, name), device=GPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardBackward, "_capture", counted)
        train(config, few_digits(root / f"digits-{name}"), session)
    session.checkpoints.finish()
    events = [message for message in session.messages if isinstance(message, Rehearsed)]
    rows = session.folder.rows("epochs.jsonl")
    return [row["loss"] for row in rows], events, torch.cuda.max_memory_allocated(), captured


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_size_is_captured_and_trains_as_launched_steps(tmp_path: Path, compiled: bool) -> None:
    config = replace(GROWING, compile=compiled)
    losses, events, _, captured = trained(config, tmp_path, "captured")
    assert captured == [128, 96, 64, 96, 128]  # rehearsed, the last one first, then used
    assert [type(event) for event in events] == [Rehearsed, CeilingMeasured, CeilingMeasured]
    assert all(event.ceiling_images_per_second for event in events)
    launched, _, _, captured = trained(replace(config, cuda_graph=False), tmp_path, "launched")
    assert not captured
    assert losses == pytest.approx(launched, rel=0.05)  # kernels are chosen anew in each run


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_micro_batches_train_as_launched_ones(tmp_path: Path, precision: PrecisionName) -> None:
    """With a moving average, clipping and mixup; fp16 scales the gradients that micro-batches add."""
    several: dict[str, Any] = {"batch_size": 16, "ema_decay": 0.9, "clip_grad": 1.0, "mixup": 0.2}
    config = replace(GROWING, **several, precision=precision)
    losses, _, _, captured = trained(config, tmp_path, "captured")
    assert captured == [128, 96, 64, 96, 128]
    launched, _, _, captured = trained(replace(config, cuda_graph=False), tmp_path, "launched")
    assert not captured
    assert losses == pytest.approx(launched, rel=0.05)


def test_memory_is_that_of_the_largest_size(tmp_path: Path) -> None:
    *_, growing, _ = trained(GROWING, tmp_path, "growing")
    *_, largest, _ = trained(replace(GROWING, image_size=128), tmp_path, "largest")
    assert growing < 1.1 * largest
