"""A bad step that is taken back on a GPU: under a captured CUDA graph, compiled or not, without a wait of the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydali.run.folder import RunFolder
from raydali.training.bad_losses import INTERVAL, LEAST, LossWatch
from raydali.training.checkpoint_file import tensors_in
from raydali.training.forward_backward import Precision
from raydali.training.models.small_images import digits_network
from raydali.training.optim import MovingAverage, build_optimizer
from raydali.training.worker import Worker
from tests.support.copied_jobs import changed_copy
from tests.support.planted_pictures import STANDARDISED, planted_digits, planted_run, state_after, steps_of
from tests.support.ranks import Stopped

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 96, "precision": "bf16"},  # one micro-batch in the graph
        {"batch_size": 16, "precision": "fp32"},  # six of them replay it
        {"batch_size": 96, "precision": "bf16", "compile": True},
        {"batch_size": 96, "precision": "fp16"},
    ],
)
def test_skip_leaves_the_batch_out_of_all_that_is_learned(tmp_path: Path, options: dict[str, Any]) -> None:
    root, job = planted_digits(tmp_path / "digits"), changed_copy("imagenet", STANDARDISED, tmp_path)
    changes: dict[str, Any] = {"checkpoint_every": 1, "ema_decay": 0.9, "on_bad_loss": "skip", **options}
    (bad, *_) = steps_of(root, "uniform", **options)
    with pytest.raises(Stopped):
        planted_run(job, root, tmp_path, stop_at=bad + 2, device="cuda:0", **changes)
    folder = RunFolder(str(tmp_path), "run")
    before, after = state_after(folder, bad), state_after(folder, bad + 1)
    for part in ("model", "optimizer", "ema"):
        pairs = zip(tensors_in(before[part]), tensors_in(after[part]), strict=True)
        assert sum(not torch.equal(was, now) for was, now in pairs) == (part == "ema"), "only its count goes on"


@pytest.mark.parametrize("reaction", ["skip", "stop"])
def test_nothing_waits(reaction: str) -> None:
    model = digits_network(10).to(DEVICE)
    optimizer = build_optimizer("adamw", model, learning_rate=0.01, weight_decay=0.1)
    average, loss_sum = MovingAverage(model, 0.9), torch.zeros((), dtype=torch.float64, device=DEVICE)
    worker = Worker(rank=0, world_size=1, device=DEVICE, cpus=1, node="")
    watch = LossWatch(worker, Precision("fp32", DEVICE), micro_batches=1, reaction=reaction)
    images = torch.rand(16, 3, 32, 32, device=DEVICE)
    found: list[tuple[int, float, float | None, bool]] = []

    def step(number: int) -> None:
        watch.begin_step(number, [model, optimizer, average], loss_sum)
        loss = model(images).square().mean()
        loss.backward()
        watch.after_backward(loss.detach(), None, None, ())  # type: ignore[arg-type]
        watch.before_update(
            nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        )
        optimizer.step()
        average.update_parameters(model)
        watch.after_update()
        optimizer.zero_grad()
        found.extend(watch.judged())

    for number in range(INTERVAL):
        step(number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(INTERVAL, LEAST + 2 * INTERVAL):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [(step, is_bad) for step, _, _, is_bad in found] == [(step, False) for step in range(LEAST + INTERVAL)]
