"""A training step never makes the host wait for the GPU, whatever its optimizer, its mixing and its average are."""

from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raydali.training.learning_rates import OptimizerName
from raydali.training.losses import mixing
from raydali.training.models.small_images import digits_network
from raydali.training.optim import MovingAverage, build_optimizer, set_learning_rate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_nothing_waits(name: OptimizerName) -> None:
    torch.manual_seed(0)
    model = digits_network(10).cuda().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(name, model, learning_rate=0.01, weight_decay=0.1, nesterov=True, head={"11.weight"})
    average, mix = MovingAverage(model, 0.99, warmup=True), mixing(0.2, 1.0, 10)
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, device="cuda")
    labels = torch.arange(16, device="cuda") % 10

    def step(rate: float) -> None:
        set_learning_rate(optimizer, rate)
        mixed, shares = mix(images, labels)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(mixed / 255), shares)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    for _ in range(3):
        step(0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(0.02)
    finally:
        torch.cuda.set_sync_debug_mode("default")
