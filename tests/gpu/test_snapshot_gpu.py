"""Snapshots that a side stream makes: they have the values of their time, and steps do not wait for them.

pytest -s tests/gpu/test_snapshot_gpu.py     prints for how long a checkpoint of ResNet-50 stops the steps
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from jobs.imagenet import DIGITS, train
from raydali.data.stream.stream import Stream
from raydali.run.folder import EPOCHS
from raydali.training.checkpoint_file import Snapshots
from raydali.training.optim import MovingAverage
from tests.support.digits import digits_data
from tests.support.ranks import LocalSession, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DEVICE = torch.device("cuda", 0)


def test_what_changes_at_once_is_copied_before() -> None:
    model = torchvision.models.resnet50().to(DEVICE)
    average = MovingAverage(model, 0.9)
    expected = [value.clone() for value in model.state_dict().values()]
    snapshots = Snapshots(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)), torch.no_grad():
        for _ in range(3):
            torch.cuda.synchronize()
            copy = snapshots.take({"model": model.state_dict(), "ema": average.state_dict()}, [model, average])
            for buffer in model.buffers():  # as the next forward pass does
                buffer.add_(1)
            snapshots.before_update()
            for parameter in model.parameters():
                parameter.add_(1)
            copy.wait()
            for host, value in zip(copy.state["model"].values(), expected, strict=True):
                assert host.is_pinned() and torch.equal(host, value.cpu())
            torch._foreach_add_(expected, 1)


class Unhurried(LocalSession):
    """A session whose checkpoints are written before the next one begins, as in longer epochs."""

    def __init__(self, path: Path) -> None:
        super().__init__(folder_of(path), device=DEVICE, cpus=4, waits_for_saves=False)
        self.saved_at: list[int] = []
        self.allocations: list[int] = []

    def commit(self, step: int, state: dict[str, Any] | None, **options: Any) -> None:
        self.saved_at.append(step)
        self._count_allocations()
        super().commit(step, state, **options)

    def _count_allocations(self) -> None:
        self.allocations.append(torch.cuda.host_memory_stats()["num_host_alloc"])

    def report_start(self, *, steps: int) -> None:
        super().report_start(steps=steps)
        self._count_allocations()

    def report_progress(self, stream: Stream) -> None:
        if self.cursor.done == self.cursor.saved + 1:
            self.checkpoints.wait()


def test_a_checkpoint_stops_the_steps_only_shortly(tmp_path: Path) -> None:
    """Of SGD with momentum and a moving average, at the ends of epochs and inside."""
    config = replace(DIGITS, model="resnet50", image_size=224, resize_size=224, precision="bf16", ceiling=False)
    config = replace(config, epochs=5, batch_size=64, global_batch_size=64, checkpoint_every=11, ema_decay=0.9)
    session = Unhurried(tmp_path)
    train(config, digits_data(), session)
    session.checkpoints.finish()
    rows = session.folder.rows(EPOCHS)
    stalls = []
    for before, row in pairwise(rows):  # an epoch is measured from before its predecessor's checkpoint
        checkpoints = sum(before["step"] <= step < row["step"] for step in session.saved_at)
        stalls.append(row["ranks"][0]["checkpoint_seconds"] * 1000 / checkpoints)
    print("\nmilliseconds of a checkpoint:", *(f"{stall:.1f}" for stall in stalls))
    print("pinned blocks allocated until the first step, and until each checkpoint:", *session.allocations)
    assert session.allocations[0] == session.allocations[-1]
    assert min(stalls) < 15
