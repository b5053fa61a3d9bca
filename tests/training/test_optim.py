"""Optimizers and averages: groups of parameters, updates against torch's own, and their state in checkpoints."""

import copy
import io
import math
from typing import Any, get_args

import pytest
import torch
from torch import nn

from jobs.imagenet import Config
from raydali import extras
from raydali.errors import UsageError
from raydali.launch.driver.option_checks import check
from raydali.launch.worker.rehearsal import undone
from raydali.training.checkpoint_file import serialize, snapshot
from raydali.training.forward_backward import Precision
from raydali.training.learning_rates import OptimizerName
from raydali.training.models.classification import build_model, head_names
from raydali.training.models.small_images import digits_network
from raydali.training.optim import (
    MovingAverage,
    NoDecay,
    build_optimizer,
    hidden_matrices,
    load_optimizer,
    parameter_groups,
    set_learning_rate,
)
from tests.support.messages import mentioning
from tests.support.quick import first_quick
from tests.support.torch_muon import ComparedMuon

NAMES = get_args(OptimizerName)
HEAD = "11.weight", "11.bias"
"""The head of `digits_network`."""


def digits(name: OptimizerName) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The network in channels-last format, with a frozen layer and layers of different rates."""
    torch.manual_seed(0)
    model = digits_network(10).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    scales = {name: 1.0 if name in HEAD else 0.5 for name, _ in model.named_parameters()}
    options: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "scales": scales, "head": HEAD}
    return model, build_optimizer(name, model, learning_rate=0.01, **options)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, precision: Precision | None = None
) -> float:
    generator = torch.Generator().manual_seed(seed)
    scaler = (precision or Precision("fp32", torch.device("cpu"))).scaler
    images, labels = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8)
    loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, tensor), another in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, another, rtol=0, atol=0, msg=name)


@first_quick("name", NAMES)
def test_each_optimizer_learns_and_leaves_frozen_weights(name: OptimizerName) -> None:
    model, optimizer = digits(name)
    frozen = copy.deepcopy(model[0])
    set_learning_rate(optimizer, 1.0 if name == "lars" else 0.01)
    losses = [train_step(model, optimizer, seed=0) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert_equal_weights(model[0], frozen)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_without_timm_its_extra_is_named_before_the_start(name: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(optimizer=name, batch_size=32)
    check(config, samples=1000)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=mentioning("pip install timm")):
        check(config, samples=1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_continues_exactly(name: OptimizerName) -> None:
    model, optimizer = digits(name)
    for seed in range(3):
        train_step(model, optimizer, seed)
    state = checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, its_optimizer = digits(name)
    resumed.load_state_dict(state["model"])
    load_optimizer(its_optimizer, state["optimizer"])
    for seed in range(3, 6):
        assert train_step(model, optimizer, seed) == train_step(resumed, its_optimizer, seed)
    assert_equal_weights(model, resumed)


def checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a run reads it from its checkpoint."""
    file = io.BytesIO(serialize(snapshot(state)))
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@first_quick("name", NAMES)
@first_quick("done", [2, 0])
def test_warm_up_steps_are_undone(name: OptimizerName, done: int) -> None:
    (model, optimizer), (other, its_optimizer) = digits(name), digits(name)
    precision = Precision("fp32", torch.device("cpu"))
    for seed in range(done):
        train_step(model, optimizer, seed)
        train_step(other, its_optimizer, seed)
    with undone([model], optimizer, precision):
        for seed in range(7, 9):
            train_step(model, optimizer, seed)
    for seed in range(done, done + 3):
        train_step(model, optimizer, seed)
        train_step(other, its_optimizer, seed)
    assert_equal_weights(model, other)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_scaler_of_fp16_does_not_change_the_updates(name: OptimizerName) -> None:
    (model, optimizer), (other, its_optimizer) = digits(name), digits(name)
    fp16 = Precision("fp16", torch.device("cpu"))
    for seed in range(3):
        train_step(model, optimizer, seed)
        train_step(other, its_optimizer, seed, fp16)
    assert fp16.scaler.get_scale() == 65536  # no step was skipped
    assert_equal_weights(model, other)
    before = copy.deepcopy(other.state_dict())
    other(torch.randn(2, 3, 32, 32)).sum().mul(torch.inf).backward()
    fp16.scaler.step(its_optimizer)
    fp16.scaler.update()
    assert fp16.scaler.get_scale() == 32768
    torch.testing.assert_close(other[11].weight, before[HEAD[0]], rtol=0, atol=0)


def torchvisions_norms(model: nn.Module) -> set[nn.Parameter]:
    """Parameters to which references/classification/utils.py, set_weight_decay, gives norm_weight_decay."""
    classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
    return {p for module in model.modules() if isinstance(module, classes) for p in module.parameters(recurse=False)}


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "convnext_tiny", "swin_t"])
def test_no_decay_of_norms_is_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, 10)
    decaying, others = parameter_groups(model, 0.1, no_decay="norms")
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert set(others["params"]) == torchvisions_norms(model)
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("no_decay", "without"), [("norms", {"1"}), ("norms-and-biases", {"0", "1", "2"}), ("none", set())]
)
def test_parameters_without_decay(no_decay: NoDecay, without: set[str]) -> None:
    """Each layer has a weight and a bias; norms have them of one dimension."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    decaying, others = parameter_groups(model, 0.1, no_decay=no_decay)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {name for name in names.values() if name[0] in without and (name[0] == "1" or name.endswith("bias"))}
    assert {names[each] for each in others["params"]} == expected
    assert {names[each] for each in decaying["params"]} == {*names.values()} - expected


def test_each_scale_has_its_groups_and_its_rate() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    scales = {name: 0.5 if name.startswith(("0.", "1.")) else 10.0 for name, _ in model.named_parameters()}
    optimizer = build_optimizer("adamw", model, learning_rate=0.1, weight_decay=0.2, scales=scales)
    set_learning_rate(optimizer, 0.01)
    groups = [(g["lr_scale"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert groups == [(0.5, 0.005, 0.0, 3), (10.0, 0.1, 0.2, 1), (10.0, 0.1, 0.0, 1)]


def test_a_resume_takes_momenta_but_not_settings() -> None:
    model = nn.Linear(2, 2)
    before = torch.optim.SGD(parameter_groups(model, 0.5), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    before.step()
    after = torch.optim.SGD(parameter_groups(model, 0.25), lr=0.2, momentum=0.8)
    load_optimizer(after, before.state_dict())
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in after.param_groups] == [
        (0.2, 0.8, 0.25),
        (0.2, 0.8, 0.0),
    ]
    torch.testing.assert_close(after.state[model.weight], before.state[model.weight])


@pytest.mark.parametrize("formats", [(torch.contiguous_format, torch.channels_last), (torch.channels_last,) * 2])
def test_loaded_momenta_have_the_strides_of_their_weights(formats: tuple[torch.memory_format, ...]) -> None:
    def trained(memory_format: torch.memory_format) -> tuple[nn.Conv2d, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 4, 3).to(memory_format=memory_format)
        optimizer = build_optimizer("sgd", model, learning_rate=0.1, weight_decay=0.0)
        model(torch.ones(1, 4, 5, 5)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    (_, before), (model, after) = map(trained, formats)
    expected = after.state[model.weight]["momentum_buffer"].clone()
    load_optimizer(after, copy.deepcopy(before.state_dict()))
    loaded = after.state[model.weight]["momentum_buffer"]
    assert loaded.stride() == model.weight.stride()
    torch.testing.assert_close(loaded, expected)


@pytest.mark.parametrize(("device", "there"), [("meta", True), ("cpu", False)])
def test_adams_step_lies_where_the_optimizer_of_now_wants_it(device: str, there: bool) -> None:
    """Fused kernels, which only GPUs have here, take it on their device; torch itself goes by the checkpoint."""
    on_other = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=not there)
    on_other.param_groups[0]["params"][0].grad = torch.ones(2)
    on_other.step()
    parameter = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([parameter], fused=there)
    load_optimizer(optimizer, on_other.state_dict())
    assert optimizer.param_groups[0]["fused"] is there
    assert optimizer.state[parameter]["step"].device.type == device


# ---------------------------------------------------------------------------------------------------------------------
# The moving average of weights


def test_an_average_begins_with_the_weights_whatever_it_had() -> None:
    model = nn.Linear(2, 2)
    average = MovingAverage(model, 0.9)
    for parameter in average.parameters():
        nn.init.constant_(parameter, math.nan)
    average.update_parameters(model)
    for parameter, expected in zip(average.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("cut", [None, 1, 3])
def test_the_average_of_all_steps(warmup: bool, cut: int | None) -> None:
    """With a resume after some steps, which continues exactly."""
    model = nn.Linear(1, 1, bias=False)
    average = MovingAverage(model, 0.5, warmup=warmup)
    expected = 0.0
    for step, weight in enumerate((3.0, 5.0, -2.0, 8.0, 4.0, 1.0, 0.0, 7.0, 2.0, 6.0)):
        if step == cut:
            saved = average.state_dict()
            average = MovingAverage(model, 0.5, warmup=warmup)
            average.load_state_dict(saved)
        nn.init.constant_(model.weight, weight)
        average.update_parameters(model)
        decay = min(0.5, (1 + step) / (10 + step)) if warmup else 0.5  # 2/11 in step 1, 0.5 from step 8
        expected = decay * expected + (1 - decay) * weight if step else weight
        torch.testing.assert_close(average.module.weight, torch.tensor([[expected]]))


# ---------------------------------------------------------------------------------------------------------------------
# Muon


@pytest.mark.parametrize("kernel_size", [3, 1])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_convolutions_as_matrices_and_leaves_the_rest_to_adamw(
    memory_format: torch.memory_format, kernel_size: int
) -> None:
    """Against torch's own Muon on linear layers with the same weights, and its AdamW."""
    torch.manual_seed(0)
    convolution, norm, head = nn.Conv2d(3, 8, kernel_size), nn.BatchNorm2d(8), nn.Linear(8, 2)
    model = nn.Sequential(convolution, norm, head).to(memory_format=memory_format)
    options: dict[str, Any] = {"momentum": 0.8, "nesterov": True}
    optimizer = build_optimizer("muon", model, learning_rate=0.01, weight_decay=0.1, head={"2.weight"}, **options)
    matrix = nn.Parameter(convolution.weight.detach().flatten(1).clone())
    muon = torch.optim.Muon([matrix], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **options)
    others = [nn.Parameter(each.detach().clone()) for each in (head.weight, head.bias, norm.weight)]
    decays = zip(others, (0.1, 0.0, 0.0), strict=True)
    adamw = torch.optim.AdamW([{"params": [each], "weight_decay": decay} for each, decay in decays], lr=0.01)
    for _ in range(3):
        gradients = [torch.randn_like(each) for each in (matrix, *others)]
        matrix.grad, convolution.weight.grad = gradients[0], gradients[0].view_as(convolution.weight)
        for parameter, other, gradient in zip(
            (head.weight, head.bias, norm.weight), others, gradients[1:], strict=True
        ):
            parameter.grad = other.grad = gradient
        for each in (optimizer, muon, adamw):
            each.step()
    assert convolution.weight.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(convolution.weight.flatten(1), matrix)
    for parameter, other in zip((head.weight, head.bias, norm.weight), others, strict=True):
        torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("resnet18", {"fc.weight"}),
        ("vit_b_32", {"encoder.pos_embedding", "heads.head.weight"}),
        ("convnext_tiny", {"classifier.2.weight"}),
    ],
)
def test_muon_takes_weights_of_hidden_layers(name: str, left_out: set[str]) -> None:
    with torch.device("meta"):
        model = build_model(name, 10)
    matrices = hidden_matrices(model, head_names(lambda classes: build_model(name, classes), 10))
    others = {
        name: p.shape for name, p in model.named_parameters() if p not in matrices and sum(n > 1 for n in p.shape) > 1
    }
    depthwise = {name for name, shape in others.items() if len(shape) == 4 and shape[1] == 1}
    assert others.keys() - depthwise == left_out
    assert bool(depthwise) is (name == "convnext_tiny")


@first_quick("keeps_gradients", [False, True])
def test_updates_are_torchs_at_any_rate_and_after_loading_momenta(keeps_gradients: bool) -> None:
    torch.manual_seed(0)
    model = digits_network(10).to(memory_format=torch.channels_last)
    compared = ComparedMuon(model, keeps_gradients=keeps_gradients)
    for step in range(8):
        compared.step(0.01 / (step + 1), seed=step)
        if step == 3:
            addresses = compared.addresses()
            compared.reload()
            assert compared.addresses() != addresses
    compared.check()
    assert compared.addresses() == addresses  # a CUDA graph has captured them


def test_momenta_begin_again_if_there_are_none_to_load() -> None:
    torch.manual_seed(0)
    model = digits_network(10)
    compared = ComparedMuon(model, keeps_gradients=True)
    compared.step(0.0, seed=1)
    compared.optimizer.state.clear()
    compared.torchs.state.clear()
    compared.step(0.01, seed=2)
    compared.check()
