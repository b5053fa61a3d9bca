"""Frozen layers stay as they are and cost no backward pass; layers learn at the rates that their distance asks for."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from timm.optim._param_groups import param_groups_layer_decay
from torch import nn
from torch.nn import functional as F

from raydali.errors import UsageError
from raydali.training.batchnorm import RunningStatistics
from raydali.training.evaluation.validation import evaluating
from raydali.training.finetuning import freeze, learning_rate_scales
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.models.classification import build_model, head_names, on_meta
from raydali.training.models.small_images import digits_network
from raydali.training.optim import build_optimizer
from raydali.training.worker import Worker
from tests.support.messages import mentioning
from tests.support.ranks import run_ranks

BODY = r"(?!11\.)"
"""All of the digits network but its head."""
CPU = torch.device("cpu")
Arrays = dict[str, np.ndarray]


def frozen_network() -> nn.Sequential:
    torch.manual_seed(0)
    model = digits_network(10)
    freeze(model, BODY)
    return model


def micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 10, (4,), generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# Freezing


def test_names_are_matched_from_their_beginning() -> None:
    model = build_model("mobilenet_v2", 3)
    frozen = freeze(model, r"features\.[0-3]\.|classifier")
    assert frozen == [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert {".".join(name.split(".")[:2]) for name in frozen} == {
        "features.0",
        "features.1",
        "features.2",
        "features.3",
        "classifier.1",
    }
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert all(norm.training is (f"{name}.weight" not in frozen) for name, norm in norms.items())
    assert all(module.training for module in model.modules() if not isinstance(module, nn.BatchNorm2d))


@pytest.mark.parametrize(
    ("pattern", "mentioned"),
    [("(", "'('"), ("backbone", "'backbone' 0.weight 1.weight"), ("weight", "'weight'"), ("", "'' 11.bias")],
)
def test_a_pattern_that_makes_no_sense(pattern: str, mentioned: str) -> None:
    model = digits_network(10)
    with pytest.raises(UsageError, match=mentioning(f"--freeze {mentioned}")):
        freeze(model, pattern)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_norm_without_parameters_follows_the_pattern() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False))
    freeze(model, r"0\.bias|1\.")
    assert [module.training for module in model] == [True, False, True]


def test_a_frozen_norm_sleeps_through_validation() -> None:
    model = frozen_network()
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert not model[1].training and model[11].training


def steps_of_rank(pattern: str, micro_batches: int) -> tuple[Arrays, Arrays]:
    """Train for three steps with validation between them; return the state before and after."""
    worker = Worker.join(CPU, cpus=1, node="")
    torch.manual_seed(0)
    model = digits_network(10)
    freeze(model, pattern)
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    optimizer = build_optimizer("sgd", model, learning_rate=0.1, weight_decay=0.1)
    mine = range(worker.rank, micro_batches, worker.world_size)
    statistics = RunningStatistics(model, micro_batches=len(mine), all_micro_batches=micro_batches)
    run = ForwardBackward(
        model,
        lambda images, labels: F.cross_entropy(model(images), labels),
        worker,
        Precision("fp32", CPU),
        micro_batches=micro_batches,
    )
    for step in range(3):
        for index, number in enumerate(mine):
            statistics.begin_micro_batch(index)
            run(*micro_batch(step * micro_batches + number), last=number == mine[-1])
            statistics.end_micro_batch(index)
        optimizer.step()
        optimizer.zero_grad()
        statistics.average(worker)
        with evaluating(model):
            model(micro_batch(0)[0])
    return before, {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 3), (2, 2)])
def test_frozen_layers_never_change(world_size: int, micro_batches: int) -> None:
    first_block = r"[01]\."
    for before, after in run_ranks(world_size, steps_of_rank, first_block, micro_batches):
        for name, value in after.items():
            assert np.array_equal(value, before[name]) is name.startswith(("0.", "1.")), name
        assert after["1.num_batches_tracked"] == 0
        assert after["4.num_batches_tracked"] == 3


def test_ranks_agree_with_a_frozen_body() -> None:
    ((_, alone),) = run_ranks(1, steps_of_rank, BODY, 2)
    for _, after in run_ranks(2, steps_of_rank, BODY, 2):
        for name, value in alone.items():
            np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(micro_batch(0)[0])
    return sum(sizes)


def test_a_frozen_body_takes_no_backward_pass() -> None:
    frozen, whole = frozen_network(), digits_network(10)
    assert frozen[:11](micro_batch(0)[0]).grad_fn is None
    assert whole[:11](micro_batch(0)[0]).grad_fn is not None
    assert saved_bytes(frozen) < saved_bytes(whole) / 20


@pytest.mark.slow  # the compiler may take most of a minute
def test_compilation_of_a_frozen_body() -> None:
    def gradients(compiled: bool) -> Iterator[torch.Tensor | None]:
        model = frozen_network()
        run = ForwardBackward(
            model,
            lambda images, labels: F.cross_entropy(model(images), labels),
            Worker.join(CPU, cpus=1, node=""),
            Precision("fp32", CPU),
            micro_batches=1,
            compiled=compiled,
        )
        for number in range(2):
            run(*micro_batch(number))
        assert torch.equal(model.state_dict()["1.running_mean"], torch.zeros(32))
        return (parameter.grad for parameter in model.parameters())

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------------------------------------------------------
# Learning rates of layers


def scales_of(name: str, decay: float = 0.5, head_scale: float = 10.0) -> tuple[nn.Module, dict[str, float]]:
    build = partial(build_model, name)
    model = on_meta(partial(build, 3))
    return model, learning_rate_scales(model, head_names(build, 3), layer_decay=decay, head_lr_scale=head_scale)


def test_layers_of_torchvisions_models() -> None:
    model, scales = scales_of("resnet18")
    assert list(scales) == [name for name, _ in model.named_parameters()]
    assert scales["fc.weight"] == scales["fc.bias"] == 10
    assert scales["layer4.1.bn2.bias"] == 0.5
    assert scales["layer4.0.conv1.weight"] == scales["layer4.0.downsample.0.weight"] == 0.5**2
    assert scales["layer1.0.conv1.weight"] == 0.5**8
    assert scales["conv1.weight"] == scales["bn1.weight"] == 0.5**9

    _, scales = scales_of("mobilenet_v2")
    assert scales["features.18.0.weight"] == 0.5
    assert scales["features.17.conv.0.0.weight"] == scales["features.17.conv.2.weight"] == 0.5**2
    assert scales["features.0.0.weight"] == 0.5**19

    _, scales = scales_of("convnext_tiny")
    assert scales["classifier.2.weight"] == 10
    assert scales["classifier.0.weight"] == 0.5  # the norm after the last block
    assert scales["features.7.2.block.0.weight"] == 0.5
    assert scales["features.6.1.weight"] == 0.5**4
    assert scales["features.0.0.weight"] == 0.5 ** (3 + 3 + 9 + 3 + 3 + 1)

    _, scales = scales_of("googlenet")
    assert scales["inception5b.branch1.conv.weight"] == scales["inception5b.branch4.1.bn.bias"] == 0.5
    assert scales["conv1.conv.weight"] == 0.5**12


@pytest.mark.parametrize(("name", "body"), [("vgg11", "features.0.weight"), ("digits", "0.weight")])
def test_a_network_without_blocks_is_one_layer(name: str, body: str) -> None:
    _, scales = scales_of(name)
    assert scales[body] == 0.5
    assert set(scales.values()) == {0.5, 10.0}


def of_timm(model: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    return {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}


def test_scales_equal_timms_for_its_vision_transformers() -> None:
    for name in ("timm:vit_tiny_patch16_224", "timm:deit_tiny_distilled_patch16_224"):
        model, scales = scales_of(name, head_scale=1.0)
        assert scales == of_timm(model)


def test_layers_of_timms_convnext_are_its_stages() -> None:
    model, scales = scales_of("timm:convnext_tiny", head_scale=1.0)
    theirs = of_timm(model)
    assert len(set(scales.values())) == 1 + 4 + 1
    assert len(set(theirs.values())) > 18
    assert scales["stages.3.blocks.0.conv_dw.weight"] == 0.5
    assert all(scales[name] >= theirs[name] for name in scales if not name.startswith("head.norm"))
    assert (scales["head.norm.weight"], theirs["head.norm.weight"]) == (0.5, 1)  # a layer of the body; of the head
