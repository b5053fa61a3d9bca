"""Optimizers on a GPU, where some have fused kernels: updates as on the CPU, and resumes from checkpoints."""

from typing import Any, get_args

import pytest
import torch
from torch import nn

from raydali.launch.worker.rehearsal import undone
from raydali.training.checkpoint_file import snapshot
from raydali.training.forward_backward import Precision
from raydali.training.learning_rates import OptimizerName
from raydali.training.models.small_images import digits_network
from raydali.training.optim import build_optimizer, load_optimizer

pytestmark = pytest.mark.gpu
NAMES = get_args(OptimizerName)
GPU = torch.device("cuda", 0)


class Training:
    """Steps with gradients that are the same on each device, and which a gradient scaler has scaled."""

    def __init__(self, name: OptimizerName, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = digits_network(10).to(device).to(memory_format=torch.channels_last)
        options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": True, "head": {"11.weight"}}
        self.optimizer = build_optimizer(name, self.model, learning_rate=0.01, **options)
        self.precision = Precision("fp16", device)

    @torch.no_grad()
    def step(self, seed: int, *, clip: bool = False) -> None:
        generator, scaler = torch.Generator().manual_seed(seed), self.precision.scaler
        gradients = [torch.randn(each.shape, generator=generator) for each in self.model.parameters()]
        scale = scaler.scale(torch.ones((), device=next(self.model.parameters()).device))
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient).mul_(scale)
        if clip:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        scaler.step(self.optimizer)
        scaler.update()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_updates_are_those_of_the_cpu(name: OptimizerName, clip: bool) -> None:
    on_cpu, on_gpu = Training(name, torch.device("cpu")), Training(name, GPU)
    for seed in range(4):
        on_cpu.step(seed, clip=clip)
        on_gpu.step(seed, clip=clip)
    tolerance = 5e-3 if name == "muon" else 1e-5  # it computes in bf16
    torch.testing.assert_close(on_gpu.weights(), on_cpu.weights(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_continues_exactly_after_warm_up_steps(name: OptimizerName) -> None:
    training, resumed = Training(name, GPU), Training(name, GPU)
    for seed in range(3):
        training.step(seed)
    state = snapshot({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    resumed.model.load_state_dict(state["model"])
    load_optimizer(resumed.optimizer, state["optimizer"])
    with undone([resumed.model], resumed.optimizer, resumed.precision):
        resumed.step(9)
    for seed in range(3, 6):
        training.step(seed)
        resumed.step(seed)
    torch.testing.assert_close(resumed.weights(), training.weights(), rtol=0, atol=0)
